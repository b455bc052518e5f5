"""Frozen dataclasses that are cheap to define: what they have in common is compiled once, ``__init__`` when called.

`dataclasses.dataclass` writes and compiles six methods for each class, which for the protocol's types took half of the
time that a process of the agent needs to start; and each makes objects of few of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar

T = TypeVar("T")

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(*, frozen: Literal[True]) -> Callable[[type[T]], type[T]]:
        """Make a class what ``dataclasses.dataclass(frozen=True)`` makes of it.

        Raises: TypeError for a field that is not to be given, shown or compared, which these can't have
        """

        def make(cls: type[T]) -> type[T]:
            made = dataclasses.dataclass(init=False, eq=False, repr=False)(cls)
            if not all(one.init and one.repr and one.compare for one in dataclasses.fields(made)):
                raise TypeError(f"{cls.__qualname__}: every field is given, shown and compared")
            made.__init__ = _compile_later(made)
            made.__eq__, made.__hash__, made.__repr__ = _equal, _hash, _show
            made.__setattr__ = made.__delattr__ = _refuse
            return made

        return make


def _compile_later(cls: type[Any]) -> Callable[..., None]:
    """Return an ``__init__`` that puts the compiled one in its own place when it is first called."""

    def __init__(self: object, *args: object, **named: object) -> None:
        fields = [
            (one.name, object, dataclasses.field(default=one.default, default_factory=one.default_factory))
            for one in dataclasses.fields(cls)
        ]
        checks = {"__post_init__": cls.__post_init__} if hasattr(cls, "__post_init__") else {}
        twin = dataclasses.make_dataclass(cls.__name__, fields, namespace=checks, frozen=True, eq=False, repr=False)
        cls.__init__ = vars(twin)["__init__"]
        cls.__init__(self, *args, **named)

    return __init__


def _equal(self: object, other: object) -> Any:
    return self.__dict__ == other.__dict__ if other.__class__ is self.__class__ else NotImplemented


def _hash(self: object) -> int:
    return hash(tuple(self.__dict__.values()))


def _show(self: object) -> str:
    texts = (f"{name}={value!r}" for name, value in self.__dict__.items())
    return f"{type(self).__qualname__}({', '.join(texts)})"


def _refuse(self: object, name: str, value: object = None) -> NoReturn:
    raise dataclasses.FrozenInstanceError(f"cannot change field {name!r}")
