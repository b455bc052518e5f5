"""The command line: the console's work without a screen. Each verb's module is imported when it is asked for."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from console import __version__
from console.provenance import find_strangers


def run(argv: Sequence[str]) -> int:
    """Carry out one command line and return its exit code; nothing is raised.

    0 done · 1 a run failed · 2 usage or configuration · 3 a node unreachable · 4 aborted · 130 interrupted
    """
    complaint = find_strangers()
    if complaint is not None:
        print(f"glowplug: {complaint}", file=sys.stderr)
        return 2
    if list(argv) == ["--version"]:
        print(f"glowplug {__version__}")
        return 0
    from console.cli.main import execute

    return execute(list(argv))
