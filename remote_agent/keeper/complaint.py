"""The keeper's words for whoever reads its log."""

from __future__ import annotations

import sys


def complain(text: str) -> None:
    """Write one line to stderr; never raises: a full disk must not take the residents with it."""
    try:
        print(f"keeper: {text}", file=sys.stderr, flush=True)
    except OSError:
        pass
