"""Attribution against the plainest thing that could be right: asking of every nanosecond whose it is."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from remote_agent.pipeline.spans import Span, attribute

ORDER = ("queue", "probe", "preflight", "init", "weights")

spans = st.builds(
    lambda stage, start, length: Span(stage, start, start + length),
    st.sampled_from(ORDER),
    st.integers(-20, 60),
    st.integers(0, 60),
)


def by_counting(chosen: list[Span], wall_ns: int) -> tuple[dict[str, int], int]:
    """Give each nanosecond to the earliest stage of the order that runs in it."""
    shares, nobody = dict.fromkeys(ORDER, 0), 0
    for instant in range(wall_ns):
        running = {span.stage for span in chosen if span.start_ns <= instant < span.end_ns}
        owner = next((stage for stage in ORDER if stage in running), None)
        if owner is None:
            nobody += 1
        else:
            shares[owner] += 1
    return shares, nobody


@given(st.lists(spans, max_size=10), st.integers(0, 100))
def test_attribution_equals_counting_every_instant(chosen: list[Span], wall_ns: int) -> None:
    """Overlaps, repeats, holes and spans outside the run are all shared out as by hand."""
    assert attribute(chosen, ORDER, wall_ns) == by_counting(chosen, wall_ns)


large = st.builds(
    lambda stage, start, length: Span(stage, start, start + length),
    st.sampled_from(ORDER),
    st.integers(0, 10**13),
    st.integers(0, 10**13),
)


@given(st.lists(large, max_size=20), st.integers(0, 10**13))
def test_parts_sum_exactly_at_any_scale(chosen: list[Span], wall_ns: int) -> None:
    """Hours in nanoseconds lose none."""
    shares, unattributed = attribute(chosen, ORDER, wall_ns)

    assert sum(shares.values()) + unattributed == wall_ns
    assert min(*shares.values(), unattributed) >= 0


def test_overlap_belongs_to_the_earlier_stage() -> None:
    """While preflight runs beside init, the time is preflight's."""
    shares, unattributed = attribute([Span("init", 0, 10), Span("preflight", 2, 6)], ORDER, 12)

    assert (shares["preflight"], shares["init"], unattributed) == (4, 6, 2)


def test_a_stage_outside_the_order_is_a_mistake() -> None:
    """Time of an unknown stage is never dropped in silence."""
    with pytest.raises(KeyError):
        attribute([Span("lunch", 0, 1)], ORDER, 2)
