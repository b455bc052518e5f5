"""The console's hold on its terminal: it ends when the terminal breaks, and it ends when it is told to.

Textual writes from a thread of its own. Were that thread to die, or the terminal to take
nothing more, the event loop would wait for it for ever; nothing here depends on the loop.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import IO, TYPE_CHECKING, Any, cast

from textual.drivers.linux_driver import LinuxDriver

from console.errors import Interrupted

if TYPE_CHECKING:
    from textual.app import App

LEAVE_S = 5.0
"""How long an orderly end may take; after it the process ends without one."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_RESTORE = (
    b"\x1b[?1000l\x1b[?1003l\x1b[?1015l\x1b[?1006l"  # mouse
    b"\x1b[?2004l\x1b[?1004l\x1b[?2048l\x1b[<u"  # paste, focus and size reports, key protocol
    b"\x1b[?7h\x1b[?1049l\x1b[?25h\r\n"  # line wrap, screen, cursor
)


class Leaving:
    """Ends the app in order through ``end``, or else the process; ``reason`` says why, None while it is not asked."""

    def __init__(self, end: Callable[[], object]) -> None:
        self._end = end
        self._has_left = threading.Event()
        self._attributes: list[Any] | None = None
        self.reason: str | None = None

    def ask(self, reason: str) -> None:
        """Leave because of ``reason``; from any thread and from a signal handler. Only the first time counts."""
        if self.reason is None:
            self.reason = reason
            threading.Thread(target=self._see_to_it, name="leaving", daemon=True).start()

    @contextlib.contextmanager
    def obeying_signals(self) -> Iterator[None]:
        """Inside, a signal ends the app in order and a second one at once. Raises: Interrupted with the reason."""

        def obey(number: int, frame: FrameType | None) -> None:
            if self.reason is not None:
                self._end_process()
            self.ask(f"ended by {signal.Signals(number).name}")

        with contextlib.suppress(termios.error, ValueError, AttributeError):
            self._attributes = termios.tcgetattr(sys.__stdin__.fileno())  # type: ignore[union-attr]
        before = {number: signal.signal(number, obey) for number in _SIGNALS}
        try:
            yield
        except Exception:
            if self.reason is None:  # else it is but what leaving broke
                raise
        finally:
            self._has_left.set()
            for number, handler in before.items():
                signal.signal(number, handler)
        if self.reason is not None:
            raise Interrupted(self.reason)

    def _see_to_it(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed meanwhile
            self._end()
        if not self._has_left.wait(LEAVE_S):
            self._end_process()

    def _end_process(self) -> None:
        with contextlib.suppress(OSError, termios.error):
            _restore_terminal(self._attributes)
        os._exit(Interrupted.exit_code)


def _restore_terminal(attributes: list[Any] | None) -> None:
    """Undo what the driver switched on, without waiting for a terminal that takes nothing."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})  # in the background, too
    terminal = os.open("/dev/tty", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    if attributes is not None:
        termios.tcsetattr(terminal, termios.TCSANOW, attributes)
    os.write(terminal, _RESTORE)


class Output:
    """A stream that goes on taking text when it is broken; ``on_broken`` is told once, on the writing thread."""

    def __init__(self, stream: IO[str], on_broken: Callable[[Exception], None]) -> None:
        self._stream = stream
        self._on_broken = on_broken
        self._is_broken = False

    def write(self, text: str) -> int:
        self._attempt(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._attempt(self._stream.flush)

    def fileno(self) -> int:
        return self._stream.fileno()

    def _attempt(self, act: Callable[[], object]) -> None:
        if self._is_broken:
            return
        try:
            act()
        except (OSError, ValueError) as error:  # ValueError: it was closed
            self._is_broken = True
            self._on_broken(error)


def driver_for(leaving: Leaving) -> type[LinuxDriver]:
    """Return Textual's driver, its output an `Output`: the writing thread lives and its queue is always emptied."""

    class ConsoleDriver(LinuxDriver):
        def __init__(self, app: App[Any], **options: Any) -> None:
            super().__init__(app, **options)
            assert self._file is not None
            output = Output(self._file, lambda error: leaving.ask(f"the terminal is gone: {error}"))
            self._file = cast(Any, output)

    return ConsoleDriver
