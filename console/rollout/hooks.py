"""Runs an operator's program: its arguments without a shell, within its time, and never longer than this console."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from console.clean import clean_lines
from console.rollout.guard import CANNOT_START, GRACE_S, SILENT_S
from console.transports.base import unbroken

RETRY_CODE = 75
RETRY_PAUSE_S = 1.0
OUTPUT_BYTES = 32 << 10
OUTPUT_LINES = 200
LAST_LINE_BYTES = 1024
END_S = GRACE_S + 5.0
BEAT_S = SILENT_S / 8
_GUARD = Path(__file__).with_name("guard.py")

Said = Callable[[str], None]


@dataclass(frozen=True)
class Ended:
    """How a program ended. ``code`` is None where it ran out of time; ``output`` the last of both streams, cleaned."""

    code: int | None
    reason: str
    output: tuple[str, ...]
    tries: int
    duration_ns: int

    @property
    def succeeded(self) -> bool:
        return self.code == 0

    @property
    def was_started(self) -> bool:
        return self.code != CANNOT_START


def environment(
    base: Mapping[str, str],
    rollout_uid: str,
    phase: str,
    nodes: Sequence[tuple[str, int, int]],
    is_dry: bool = False,
) -> dict[str, str]:
    """Return the environment of a program that is run for these nodes: name, batch from 0, attempt.

    ``_NODE``, ``_BATCH`` and ``_ATTEMPT`` are empty where nodes differ in them. ``is_dry``: it is to change nothing.
    """

    def one(values: Sequence[object]) -> str:
        return str(values[0]) if len(set(values)) == 1 else ""

    return {
        **base,
        "GLOWPLUG_ROLLOUT_ID": rollout_uid,
        "GLOWPLUG_ROLLOUT_NODE": one([name for name, _, _ in nodes]),
        "GLOWPLUG_ROLLOUT_NODES": " ".join(name for name, _, _ in nodes),
        "GLOWPLUG_ROLLOUT_BATCH": one([batch + 1 for _, batch, _ in nodes]),
        "GLOWPLUG_ROLLOUT_ATTEMPT": one([attempt for _, _, attempt in nodes]),
        "GLOWPLUG_ROLLOUT_PHASE": phase,
        "GLOWPLUG_ROLLOUT_DRY_RUN": "1" if is_dry else "0",
    }


async def run_program(
    argv: Sequence[str],
    environ: Mapping[str, str],
    timeout_s: float,
    pause_s: float = RETRY_PAUSE_S,
    said: Said = lambda line: None,
) -> Ended:
    """Run a program until it ends with another code than 75, all tries together within ``timeout_s``.

    Over its time, and when this is cancelled, its whole process group is ended before this returns: by SIGTERM, and by
    SIGKILL what is left after a few seconds. So it is where this process is stopped, or its event loop hangs, for
    `SILENT_S`: another may have taken over. What a program that ended by itself has left running is left alone.
    ``said`` is told the last whole line, cleaned, each time that there is more.
    """
    began_s = time.monotonic()
    tries = 0
    while True:
        tries += 1
        code, output = await _run_once(argv, environ, timeout_s - (time.monotonic() - began_s), said)
        if code == RETRY_CODE and time.monotonic() - began_s + pause_s < timeout_s:
            await asyncio.sleep(pause_s)
            continue
        lines = clean_lines(output, OUTPUT_LINES)
        duration_ns = round((time.monotonic() - began_s) * 1e9)
        return Ended(code, _reason(code, lines, timeout_s, tries), lines, tries, duration_ns)


async def _run_once(
    argv: Sequence[str], environ: Mapping[str, str], timeout_s: float, said: Said
) -> tuple[int | None, bytes]:
    """Return how it ended, None where it ran out of time, and the last that it wrote."""
    with _Output(said) as output:
        starting = asyncio.ensure_future(_start(argv, environ, output.write_end))
        try:
            process = await unbroken(starting)
            output.begin()
            beating = asyncio.ensure_future(_beat(process))
            code: int | None = None
            try:
                async with asyncio.timeout(timeout_s):  # wait_for may lose a cancel that comes with the end
                    code = await process.wait()
            except TimeoutError:
                pass
            finally:
                beating.cancel()
        finally:
            if not starting.cancelled() and starting.exception() is None:
                await unbroken(_end(starting.result()))
        return code, output.taken()


async def _start(argv: Sequence[str], environ: Mapping[str, str], output: int) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-IS",
        str(_GUARD),
        str(SILENT_S),
        *argv,
        stdin=asyncio.subprocess.PIPE,
        stdout=output,
        stderr=output,
        env=environ,
        start_new_session=True,  # Ctrl-C in the console's terminal is not for it
    )


async def _beat(process: asyncio.subprocess.Process) -> None:
    """Let the guard know that this goes on, until it is cancelled."""
    assert process.stdin is not None
    while True:
        process.stdin.write(b".")
        await asyncio.sleep(BEAT_S)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Let go of the lifeline, and wait until the program is gone."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(END_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


class _Output:
    """A pipe of our own. For the end of its own ones asyncio waits, and what a program left running may hold them."""

    def __init__(self, said: Said) -> None:
        self._said = said
        self._read_end, self.write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        self._loop = asyncio.get_running_loop()
        self._taken = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.remove_reader(self._read_end)
        os.close(self._read_end)
        self._close_write_end()

    def begin(self) -> None:
        """Keep the pipe from filling up; the program has the other end now."""
        self._close_write_end()
        self._loop.add_reader(self._read_end, self._read)

    def taken(self) -> bytes:
        """Return the last of what was written until now."""
        while self._read():
            pass
        return self._taken

    def _read(self) -> bool:
        """Take what is there; whether there may be more."""
        try:
            data = os.read(self._read_end, OUTPUT_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._loop.remove_reader(self._read_end)
            return False
        self._taken = (self._taken + data)[-OUTPUT_BYTES:]
        self._tell()
        return True

    def _tell(self) -> None:
        end = self._taken[-LAST_LINE_BYTES:]
        for line in clean_lines(end[: max(end.rfind(b"\n"), end.rfind(b"\r")) + 1], 1):
            self._said(line)

    def _close_write_end(self) -> None:
        if self.write_end >= 0:
            os.close(self.write_end)
            self.write_end = -1


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have none
        return f"signal {number}"


def _reason(code: int | None, output: Sequence[str], timeout_s: float, tries: int) -> str:
    """Say what is wrong with how it ended, with the last thing that it said; nothing after code 0."""
    if code == 0:
        return ""
    if code is None:
        how = f"took over {timeout_s:g} s and was ended"
    elif code == CANNOT_START:
        how = "could not be started"
    elif code < 0:
        how = f"was ended by {_signal_name(-code)}"
    else:
        how = f"ended with {code}" + (f", {tries} times within {timeout_s:g} s" if code == RETRY_CODE else "")
    return f"{how}: {output[-1]}" if output else how
