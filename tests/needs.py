"""What tests need beyond Python: named with its Debian package, left out where missing, a failure in CI."""

from __future__ import annotations

import os
import shutil

import pytest

SYSTEM_PATH = ":".join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin", "/sbin"))


def need(program: str, package: str, path: str = SYSTEM_PATH) -> str:
    """Return where ``program`` is.

    Where it is missing the test is skipped and says what to install; under ``CI`` it fails,
    since whatever CI leaves out is not shown to work.
    """
    found = shutil.which(program, path=path)
    if found is not None:
        return found
    message = f"needs {program}: apt-get install {package}"
    if os.environ.get("CI"):
        pytest.fail(message)
    pytest.skip(message)


def need_root(what: str) -> None:
    """Leave a test out, in CI too, where another user than root runs it."""
    if os.geteuid() != 0:
        pytest.skip(f"needs root: {what}")
