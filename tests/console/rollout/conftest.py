"""Rollouts in a history of the test's own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from console.rollout.states import Rules
from tests.console.rollout.fakes import Desk, MakeDesk

THREE = (("a",), ("b", "c"))


@pytest.fixture
def make_desk(tmp_path: Path) -> Iterator[MakeDesk]:
    with contextlib.ExitStack() as stack:

        def make(rule: Rules, batches: Sequence[Sequence[str]] = THREE, lease_s: float = 30.0) -> Desk:
            desk = Desk(tmp_path / "history.db", rule, batches, lease_s)
            stack.callback(desk.close)
            return desk

        yield make
