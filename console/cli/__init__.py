"""The command line: the console's work without a screen. Each verb's module is imported when it is asked for."""

from __future__ import annotations

from collections.abc import Sequence

from console import __version__
from console.cli.streams import OutputError, prepared, tell
from console.provenance import find_strangers


def run(argv: Sequence[str]) -> int:
    """Carry out one command line and return its exit code; nothing is raised.

    0 done · 1 a run or gate failed · 2 usage or configuration · 3 a node unreachable · 4 aborted · 130 interrupted
    """
    try:
        with prepared():
            return _run(list(argv))
    except BrokenPipeError:
        return 0  # whoever reads has had enough
    except OutputError as error:
        tell(f"glowplug: {error}")
        return error.exit_code


def _run(argv: list[str]) -> int:
    complaint = find_strangers()
    if complaint is not None:
        tell(f"glowplug: {complaint}")
        return 2
    if argv == ["--version"]:
        print(f"glowplug {__version__}")
        return 0
    from console.cli.main import execute

    return execute(argv)
