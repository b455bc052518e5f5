"""Records do what frozen dataclasses of the standard library do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from remote_agent.protocol import records


def define(decorate: Callable[[type], type]) -> Any:
    """Return a class made by that decorator."""

    class Thing:
        name: str
        sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)
        limit: int | None = None

    return decorate(Thing)


ours, theirs = define(records.dataclass(frozen=True)), define(dataclasses.dataclass(frozen=True))
ARGUMENTS: tuple[tuple[Any, ...], ...] = (("a",), ("b",), ("a", {"x": 1}), ("a", (), 3), ("a", (), float("nan")))


@pytest.mark.parametrize("one", ARGUMENTS)
@pytest.mark.parametrize("other", ARGUMENTS)
def test_they_are_equal_where_the_standard_library_s_are(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    """By all fields, and never to another class."""
    assert (ours(*one) == ours(*other)) is (theirs(*one) == theirs(*other))
    assert ours(*one) != theirs(*one)


@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_they_are_shown_as_the_standard_library_s_are(arguments: tuple[Any, ...]) -> None:
    """Every field by its name."""
    assert repr(ours(*arguments)) == repr(theirs(*arguments))


def test_equal_ones_are_one_in_a_set() -> None:
    """Where all fields can be hashed; else they can't either."""
    assert len({ours("a", (), 3), ours("a", (), 3), ours("a", (), 4)}) == 2
    with pytest.raises(TypeError, match="unhashable"):
        hash(ours("a", {}))


def test_what_is_missing_or_too_much_is_named() -> None:
    """Also when it is the first object of its class."""
    first = define(records.dataclass(frozen=True))
    for _ in range(2):
        with pytest.raises(TypeError, match=r"Thing.__init__\(\) missing 1 required positional argument: 'name'"):
            first()
        with pytest.raises(TypeError, match="unexpected keyword argument 'nmae'"):
            first("a", nmae="b")


def test_values_are_checked_from_the_first_object_on() -> None:
    """By ``__post_init__``, which sees them all."""

    @records.dataclass(frozen=True)
    class Range:
        first: int
        last: int = 9

        def __post_init__(self) -> None:
            if self.first > self.last:
                raise ValueError(f"first: {self.first} is after {self.last}")

    for _ in range(2):
        with pytest.raises(ValueError, match="first: 10 is after 9"):
            Range(10)
    assert Range(10, last=11).last == 11


@pytest.mark.parametrize("what", ["init", "repr", "compare"])
def test_a_field_that_does_not_count_is_refused(what: str) -> None:
    """Where the class is defined, not when two of them are compared."""

    class Odd:
        field: int = dataclasses.field(default=1, **{what: False})

    with pytest.raises(TypeError, match="every field is given, shown and compared"):
        records.dataclass(frozen=True)(Odd)


def test_each_object_has_a_default_of_its_own() -> None:
    """What a factory makes is shared by none."""
    one, other = ours("a"), ours("a")
    one.sizes["x"] = 1

    assert other.sizes == {}


def test_nothing_in_one_can_be_changed() -> None:
    """A changed one is a new one."""
    thing = ours("a", limit=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        thing.name = "b"
    with pytest.raises(dataclasses.FrozenInstanceError):
        del thing.limit

    assert dataclasses.replace(thing, name="b") == ours("b", limit=3)
    assert dataclasses.asdict(thing) == {"name": "a", "sizes": {}, "limit": 3}
