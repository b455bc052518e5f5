"""The suite's parts: together they are the whole, and what one finds counts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests import run

STUB = (
    "import sys\n"
    "names = sys.argv[2:]\n"
    "place = 3 if names[0] == 'tests' else ['a', 'b', 'd'].index(names[0])\n"
    "print('part', *names)\n"
    "sys.exit(int(sys.argv[1].split(',')[place]))\n"
)
PARTS = (("a",), ("b", "c"), ("d",))


@pytest.mark.parametrize(("codes", "whole"), [("0,0,0,0", 0), ("1,0,0,0", 1), ("0,1,0,0", 1), ("0,0,2,1", 2)])
def test_a_failure_in_any_part_is_the_whole_s(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], codes: str, whole: int
) -> None:
    """All are run and heard, whichever fails; the last is whatever the others are not given."""
    monkeypatch.setattr(run, "PYTEST", (sys.executable, "-c", STUB, codes))
    monkeypatch.setattr(run, "PARTS", PARTS)

    assert run.main([]) == whole
    said = [line for line in capfd.readouterr().out.splitlines() if line.startswith("part")]
    assert said == ["part a", "part b c", "part d", "part tests --ignore=a --ignore=b --ignore=c --ignore=d"]


def test_arguments_ask_for_one_session(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Its exit code is pytest's own."""
    monkeypatch.setattr(run, "PYTEST", (sys.executable, "-c", "import sys; print(*sys.argv[1:]); sys.exit(3)"))

    assert run.main(["-k", "word"]) == 3
    assert capfd.readouterr().out == "-k word\n"


def test_everything_of_a_part_is_there() -> None:
    """One that was renamed would be in none of them."""
    assert all((Path(run.REPOSITORY) / folder).exists() for part in run.PARTS for folder in part)
