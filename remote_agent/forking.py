"""Forks of a Python process."""

from __future__ import annotations

import os
import warnings


def fork() -> int:
    """Fork without Python 3.12's warning of threads; whether that is safe is the caller's to know. Raises: OSError"""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return os.fork()
