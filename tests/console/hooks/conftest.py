"""A site of a test's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.console.hooks.sites import Site


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Site]:
    monkeypatch.setenv("GLOWPLUG_STATE", str(tmp_path / "state"))
    with ExitStack() as stack:
        yield Site(stack, monkeypatch, capsys)
