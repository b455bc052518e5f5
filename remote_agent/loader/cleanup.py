"""Cleaning up without hiding why: the first error wins, what follows from it hangs behind it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from remote_agent.errors import AgentError


@contextlib.contextmanager
def finally_do(*calls: Callable[[], object]) -> Iterator[None]:
    """Make every call when the block is left, even after one fails.

    Raises: what the block raised, else the first failure of a call; later ones are its context.
    """
    try:
        yield
    except BaseException as error:
        _make(calls, error)
        raise
    failure = _make(calls, None)
    if failure is not None:
        raise failure


@contextlib.contextmanager
def on_failure(*calls: Callable[[], object]) -> Iterator[None]:
    """Make every call when the block raises; what they raise hangs behind that."""
    try:
        yield
    except BaseException as error:
        _make(calls, error)
        raise


class Settling:
    """A call made in a thread of its own while others go on with what is ready; `finish` waits for its end.

    It is made at once, or where ``begins`` is False from `begin` on.
    """

    def __init__(self, call: Callable[[], object], name: str, begins: bool = True) -> None:
        self._call = call
        self._error: BaseException | None = None
        self._duration_ns = 0
        self._has_begun = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        if begins:
            self.begin()

    def begin(self) -> None:
        """Have the call made from now on. Safe to call again."""
        if self._has_begun:
            return
        self._has_begun = True
        try:
            self._thread.start()
        except RuntimeError:  # no thread is to be had: then it is done now
            self._run()

    def finish(self) -> int:
        """Return how many nanoseconds the call took, once it is over. Raises: what it raised."""
        self.begin()
        if self._thread.ident is not None:
            self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self._duration_ns

    def _run(self) -> None:
        begun = time.monotonic_ns()
        try:
            self._call()
        except BaseException as error:
            self._error = error
        self._duration_ns = time.monotonic_ns() - begun


def _make(calls: tuple[Callable[[], object], ...], first: BaseException | None) -> BaseException | None:
    for call in calls:
        try:
            call()
        except (AgentError, OSError) as error:
            if first is None:
                first = error
            else:
                _hang_behind(first, error)
    return first


def _hang_behind(first: BaseException, later: BaseException) -> None:
    """Make ``later`` the last of what ``first`` came with; it was raised while ``first`` was handled."""
    known = _chain(first)
    for one in _chain(later):
        if any(one.__context__ is before for before in known):
            one.__context__ = None  # or the two would lead in a circle
            break
    known[-1].__context__ = later


def _chain(error: BaseException) -> list[BaseException]:
    chain = [error]
    while chain[-1].__context__ is not None:
        chain.append(chain[-1].__context__)
    return chain
