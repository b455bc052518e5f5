"""Fixtures for the history's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from db.database import open_history


@pytest.fixture
def history_path(tmp_path: Path) -> Path:
    """A history that has just been created."""
    return open_history(tmp_path / "history.db").path
