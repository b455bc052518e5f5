"""The console in real pseudo-terminals that break, or that nobody reads: it ends all the same."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from console.errors import Interrupted
from console.terminal import Leaving, Output

REPOSITORY = Path(__file__).parents[3]
DEADLINE_S = 60.0
ALT_SCREEN = b"\x1b[?1049h"


class Console:
    """``glowplug`` on one node out of reach; ``keys`` and ``screen`` are the masters of its two pseudo-terminals."""

    def __init__(self, directory: Path) -> None:
        config = directory / "fleet.toml"
        config.write_text('[nodes.gone]\ntransport = ["false"]\nconnect_timeout_s = 0.5\n', encoding="utf-8")
        self.keys, keyboard = pty.openpty()
        self.screen, display = pty.openpty()
        self.keyboard = os.dup(keyboard)
        self.attributes = termios.tcgetattr(keyboard)
        self._is_broken = False
        environ = {**os.environ, "GLOWPLUG_STATE": str(directory), "GLOWPLUG_HISTORY": str(directory / "history.db")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "console", "--config", str(config)],
            cwd=REPOSITORY,
            env={**environ, "TERM": "xterm-256color"},
            stdin=keyboard,
            stdout=subprocess.DEVNULL,
            stderr=display,
            start_new_session=True,
        )
        os.close(keyboard)
        os.close(display)

    def read_until(self, wanted: bytes) -> bytes:
        told = b""
        while wanted not in told:
            told += os.read(self.screen, 65536)
        return told

    def read_on(self) -> None:
        """Go on reading what it draws, as a terminal does."""

        def read() -> None:
            try:
                while os.read(self.screen, 65536):
                    pass
            except OSError:
                pass

        threading.Thread(target=read, daemon=True).start()

    def break_screen(self) -> None:
        self._is_broken = True
        os.close(self.screen)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for descriptor in (self.keys, self.keyboard, *([] if self._is_broken else [self.screen])):
            os.close(descriptor)


@pytest.fixture
def console(tmp_path: Path) -> Iterator[Console]:
    console = Console(tmp_path)
    yield console
    console.close()


def test_it_ends_when_its_terminal_breaks(console: Console) -> None:
    """A screen that can't be written to ends the console in order: it neither waits nor spins."""
    console.read_until(ALT_SCREEN)
    console.break_screen()

    assert console.process.wait(DEADLINE_S) == 130
    assert termios.tcgetattr(console.keyboard) == console.attributes


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_it_in_order(console: Console, number: signal.Signals) -> None:
    """The screen is left, the keyboard is as it was."""
    console.read_until(ALT_SCREEN)
    console.process.send_signal(number)
    console.read_until(b"\x1b[?1049l")
    console.read_on()

    assert console.process.wait(DEADLINE_S) == 130
    assert termios.tcgetattr(console.keyboard) == console.attributes


def test_a_signal_ends_it_though_nobody_reads_its_screen(console: Console) -> None:
    """A terminal that takes nothing more can't keep the process."""
    console.read_until(ALT_SCREEN)
    console.process.send_signal(signal.SIGTERM)

    assert console.process.wait(DEADLINE_S) == 130


def test_without_a_terminal_it_says_so_and_what_needs_none(tmp_path: Path) -> None:
    """Neither the console nor the demo's screen opens where nobody sees it: one line, exit code 2."""
    config = tmp_path / "fleet.toml"
    config.write_text('[nodes.gone]\ntransport = ["false"]\n', encoding="utf-8")
    for argv, instead in (["--config", str(config)], "glowplug status"), (["demo"], "--headless"):
        told = subprocess.run(
            [sys.executable, "-m", "console", *argv],
            cwd=REPOSITORY,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert told.returncode == 2
        assert told.stdout == ""
        assert told.stderr.startswith("glowplug: the console needs a terminal; ")
        assert instead in told.stderr


def test_a_broken_output_goes_on_taking_text_and_tells_once() -> None:
    """Textual's writing thread must never see the error, or nobody empties its queue."""
    told: list[Exception] = []
    reading, writing = os.pipe()
    os.close(reading)
    stream = open(writing, "w", encoding="utf-8")  # noqa: SIM115 - can't be closed in order
    output = Output(stream, told.append)
    for _ in range(3):
        output.write("x")
        output.flush()
    with pytest.raises(BrokenPipeError):
        stream.close()

    assert [type(error) for error in told] == [BrokenPipeError]


def test_an_app_is_asked_to_end_once_and_the_first_reason_stands() -> None:
    """Later reasons are what the first one broke."""
    asked = threading.Event()
    leaving = Leaving(asked.set)

    def ask_twice() -> None:
        with leaving.obeying_signals():
            leaving.ask("first")
            leaving.ask("second")
            assert asked.wait(DEADLINE_S)

    with pytest.raises(Interrupted, match="first"):
        ask_twice()
