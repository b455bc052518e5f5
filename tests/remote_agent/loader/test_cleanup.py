"""Cleaning up hides no error and leaves out no call."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from remote_agent.errors import DeviceError
from remote_agent.loader.cleanup import finally_do


def failing(text: str, made: list[str]) -> Callable[[], None]:
    def call() -> None:
        made.append(text)
        raise DeviceError(text)

    return call


def contexts(error: BaseException) -> list[str]:
    found = []
    while error.__context__ is not None and len(found) < 10:
        error = error.__context__
        found.append(str(error))
    return found


def test_the_first_error_wins_and_later_ones_hang_behind_it() -> None:
    """What the block raised comes out; every call is made, and their failures are its context, in a line."""
    made: list[str] = []
    block = ValueError("block")
    block.__context__ = KeyError("cause")

    with pytest.raises(ValueError, match="block") as caught, finally_do(failing("one", made), failing("two", made)):
        raise block

    assert made == ["one", "two"]
    assert contexts(caught.value) == ["'cause'", "one", "two"]


def test_a_call_that_fails_alone_is_raised_after_the_others() -> None:
    """Where the block went well the first failure of a call comes out, and the rest are made."""
    made: list[str] = []

    with pytest.raises(DeviceError, match="one") as caught, finally_do(failing("one", made), failing("two", made)):
        made.append("block")

    assert made == ["block", "one", "two"]
    assert contexts(caught.value) == ["two"]
