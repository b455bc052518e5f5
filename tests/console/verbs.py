"""Verbs as processes of their own, and the documents that they print."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


def glowplug(*argv: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "console", *argv], capture_output=True, text=True, cwd=REPOSITORY, timeout=60, **options
    )  # type: ignore[call-overload,no-any-return]


def document(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    content = json.loads(capsys.readouterr().out)
    assert isinstance(content, dict)
    return content
