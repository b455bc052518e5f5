"""Frozen dataclasses that are cheap to define: what all of them have in common is compiled once, not once a class.

`dataclasses.dataclass` writes and compiles six methods for each class, which for the protocol's types takes longer
than all else that a process of the agent does before it starts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeVar

T = TypeVar("T")

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(*, frozen: Literal[True]) -> Callable[[type[T]], type[T]]:
        """Make a class what ``dataclasses.dataclass(frozen=True)`` makes of it."""

        def make(cls: type[T]) -> type[T]:
            made = dataclasses.dataclass(frozen=frozen, eq=False, repr=False)(cls)
            made.__eq__, made.__hash__, made.__repr__ = _equal, _hash, _show
            return made

        return make


def _equal(self: object, other: object) -> Any:
    return self.__dict__ == other.__dict__ if other.__class__ is self.__class__ else NotImplemented


def _hash(self: object) -> int:
    return hash(tuple(self.__dict__.values()))


def _show(self: object) -> str:
    texts = (f"{name}={value!r}" for name, value in self.__dict__.items())
    return f"{type(self).__qualname__}({', '.join(texts)})"
