"""How sizes become batches."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from console.rollout.sizes import cut, resolve, size_problem

sizes = st.one_of(st.integers(1, 400), st.integers(1, 100).map(lambda percent: f"{percent}%"))


@pytest.mark.parametrize(
    ("size", "count", "nodes"),
    [("10%", 300, 30), ("10%", 3, 1), ("1%", 3, 1), ("50%", 3, 1), ("99%", 300, 297), ("100%", 7, 7), (5, 3, 5)],
)
def test_a_percentage_rounds_down_and_is_at_least_one(size: int | str, count: int, nodes: int) -> None:
    """Of the whole list, whatever is left of it."""
    assert resolve(size, count) == nodes


def test_the_last_entry_of_serial_repeats() -> None:
    """Batches of it follow until every node has one; the last may be smaller."""
    names = [f"n{number}" for number in range(8)]

    assert [len(batch) for batch in cut(names, None, (1, 3))] == [1, 3, 3, 1]


def test_the_canary_is_a_batch_before_the_first_of_serial() -> None:
    """Its percentage is of the whole list too."""
    names = [f"n{number}" for number in range(20)]

    assert [len(batch) for batch in cut(names, "10%", ("25%", "100%"))] == [2, 5, 13]


@settings(derandomize=True, max_examples=100)
@given(count=st.integers(0, 300), canary=st.none() | sizes, serial=st.lists(sizes, min_size=1, max_size=4))
def test_every_node_is_in_one_batch_in_its_order(count: int, canary: int | str | None, serial: list[int | str]) -> None:
    """None is left out, none comes twice, and no batch is empty."""
    names = [f"n{number}" for number in range(count)]
    batches = cut(names, canary, serial)

    assert [name for batch in batches for name in batch] == names
    assert all(batches)


@pytest.mark.parametrize("size", [0, -1, "0%", "101%", "1000%", "10", "%", "1.5%", " 5%", "٣%", ""])
def test_a_size_that_is_none_is_said_to_be(size: int | str) -> None:
    """Nothing is guessed."""
    assert size_problem(size) is not None
