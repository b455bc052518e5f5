"""The three standard streams, which may be closed, full or cut off: none of that may crash or change what is done."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from console.errors import GlowplugError


class OutputError(GlowplugError):
    """Standard output can't be written to."""


class _Output(io.FileIO):
    """Tells its own errors from everybody else's; a closed pipe stays a `BrokenPipeError`."""

    def write(self, data: object) -> int | None:  # type: ignore[override]
        try:
            return super().write(data)  # type: ignore[arg-type]
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise
            raise OutputError(f"stdout: {error.strerror}") from error


@contextmanager
def prepared() -> Iterator[None]:
    """Have three open streams; inside, what can't be written to stdout raises OutputError or BrokenPipeError.

    A closed stream is nobody's and takes everything. In the end nothing is left for the interpreter to
    write: it would complain, and change the exit code.
    """
    _open_closed()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    own, before = None, sys.stdout
    if before is sys.__stdout__ and isinstance(before, io.TextIOWrapper):
        raw = io.BufferedWriter(_Output(before.fileno(), "w", closefd=False))
        own = io.TextIOWrapper(raw, before.encoding, "replace", line_buffering=before.isatty())
        sys.stdout = own
    try:
        yield
        sys.stdout.flush()
    except (BrokenPipeError, OutputError):
        nowhere(1)
        raise
    finally:
        if own is not None:
            try:
                own.flush()
            except (OSError, OutputError):
                nowhere(1)
            sys.stdout = before


def tell(text: str) -> None:
    """Write one line to stderr, if it can be written to."""
    try:
        print(text, file=sys.stderr, flush=True)
    except (OSError, ValueError):
        nowhere(2)


def nowhere(descriptor: int) -> None:
    """Let everything that is still to be written there vanish."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)


def _open_closed() -> None:
    """Put the null device where a standard descriptor is closed, before a file of ours gets its number."""
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is not None:
            continue
        null = os.open(os.devnull, os.O_RDWR)
        if null != descriptor:
            os.dup2(null, descriptor)
            os.close(null)
        stream = open(descriptor, mode, encoding="utf-8", closefd=False)  # noqa: SIM115 - lives as long as we
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
