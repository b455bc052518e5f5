"""Cleaning up without hiding why: the first error wins, what follows from it hangs behind it."""

from __future__ import annotations

import contextlib
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
