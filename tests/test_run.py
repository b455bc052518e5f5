"""The suite's two halves: together they are the whole, and what one finds counts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests import run

STUB = (
    "import sys\n"
    "is_rest = any(word.startswith('--ignore=') for word in sys.argv)\n"
    "print('the rest' if is_rest else 'the first', *sys.argv[2:])\n"
    "sys.exit(int(sys.argv[1].split(',')[is_rest]))\n"
)


@pytest.mark.parametrize(("codes", "whole"), [("0,0", 0), ("1,0", 1), ("0,1", 1), ("0,2", 2)])
def test_a_failure_in_either_half_is_the_whole_s(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], codes: str, whole: int
) -> None:
    """Both are run and heard, whichever fails; what the first is given the other leaves out."""
    monkeypatch.setattr(run, "PYTEST", (sys.executable, "-c", STUB, codes))

    assert run.main([]) == whole
    said = capfd.readouterr().out.splitlines()
    assert said[0] == f"the first {' '.join(run.FIRST_HALF)}"
    assert said[-1] == f"the rest tests {' '.join(f'--ignore={folder}' for folder in run.FIRST_HALF)}"


def test_arguments_ask_for_one_session(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Its exit code is pytest's own."""
    monkeypatch.setattr(run, "PYTEST", (sys.executable, "-c", STUB, "3,0"))

    assert run.main(["-k", "word"]) == 3
    assert capfd.readouterr().out == "the first -k word\n"


def test_the_first_half_is_there() -> None:
    """A folder that was renamed would be in neither half."""
    assert all((Path(run.REPOSITORY) / folder).is_dir() for folder in run.FIRST_HALF)
