"""What attaching costs is a median of enough attaches, with its spread."""

from __future__ import annotations

import sys

import pytest

from bench import attach_cpu


def test_a_step_is_told_by_median_and_range_in_milliseconds() -> None:
    """Nanoseconds go in; nothing is averaged."""
    told = attach_cpu.summarise({"map": [1_000_000, 9_000_000, 2_000_000]})

    assert told == {"map": {"median": 2.0, "min": 1.0, "max": 9.0, "n": 3}}


def test_too_few_attaches_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A median of eight is no figure; nothing is started for it."""
    monkeypatch.setattr(sys, "argv", ["attach_cpu", "--rounds", "8"])

    with pytest.raises(SystemExit, match="2"):
        attach_cpu.main()
    assert "at least 9 rounds" in capsys.readouterr().err
