"""Whoever pulls, each segment is moved once."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remote_agent.loader.plan import Segment
from remote_agent.loader.schedule import Chunk, SegmentQueue


def chunks(shard: int, count: int, is_cached: bool = True, start: int = 0) -> list[Chunk]:
    return [Chunk(Segment(shard, 10 * (start + number), 10), is_cached) for number in range(count)]


def test_the_two_sides_take_from_opposite_ends() -> None:
    """Runs come from the front, as long as is allowed and half of what is left; single segments from the back."""
    queue = SegmentQueue(chunks(0, 8), [], registers=True)

    first = queue.take_run(30)
    queue.settle()
    last = queue.take(True)
    second = queue.take_run(1000)

    assert [chunk.segment.offset for chunk in first] == [0, 10, 20]
    assert last == Chunk(Segment(0, 70, 10), True)
    assert [chunk.segment.offset for chunk in second] == [30, 40]


def test_a_run_ends_with_its_shard_and_at_a_gap() -> None:
    """One registration covers one stretch of one file."""
    queue = SegmentQueue([*chunks(0, 2), *chunks(0, 2, start=5), *chunks(1, 9)], [], registers=True)

    runs = [[chunk.segment.offset for chunk in queue.take_run(1000, without)] for without in ((), (), (0,))]

    assert runs == [[0, 10], [50, 60], [0, 10, 20, 30]]


def test_readers_prefer_what_they_are_told_to() -> None:
    """Some begin with what waits for a disk, others with what is cached; each takes the other kind afterwards."""
    for prefers_cached, expected in ((True, [True, False]), (False, [False, True])):
        queue = SegmentQueue(chunks(0, 1), chunks(1, 1, is_cached=False), registers=False)

        taken = [queue.take(prefers_cached) for _ in range(3)]

        assert [chunk.is_cached for chunk in taken if chunk is not None] == expected
        assert taken[2] is None


@pytest.mark.parametrize("waits_for_it", [True, False])
def test_what_is_given_back_is_read(waits_for_it: bool) -> None:
    """A reader waits for what is held, and gets it when it is given back."""
    queue = SegmentQueue(chunks(0, 2), [], registers=True, waits_for_it=waits_for_it)
    held = queue.take_run(1000)
    taken: list[Chunk | None] = []
    reader = threading.Thread(target=lambda: taken.extend(iter(lambda: queue.take(True), None)))
    reader.start()
    queue.give_back(held)
    queue.close_runs()
    reader.join()

    assert sorted(chunk.segment.offset for chunk in taken if chunk is not None) == [0, 10]


def test_readers_that_leave_all_to_the_other_side_end_with_it() -> None:
    """Where everything is registered nothing is read."""
    queue = SegmentQueue(chunks(0, 9), [], registers=True, waits_for_it=True)
    taken: list[Chunk | None] = []
    reader = threading.Thread(target=lambda: taken.append(queue.take(True)))
    reader.start()
    runs = []
    while run := queue.take_run(20):
        runs.append(run)
        queue.settle()
    queue.close_runs()
    reader.join()

    assert sum(map(len, runs)) == 9
    assert taken == [None]


def test_a_stopped_queue_gives_nothing_out() -> None:
    """Once a load is given up nobody begins anything."""
    queue = SegmentQueue(chunks(0, 9), chunks(1, 9, is_cached=False), registers=True)

    queue.stop()

    assert queue.take_run(1000) == ()
    assert queue.take(True) is None


@given(
    sizes=st.lists(st.integers(0, 12), max_size=4),
    uncached=st.integers(0, 12),
    readers=st.integers(1, 4),
    limit=st.integers(10, 60),
    refuse_at=st.integers(0, 20),
    waits_for_it=st.booleans(),
)
def test_each_segment_is_taken_once_whoever_is_faster(
    sizes: list[int], uncached: int, readers: int, limit: int, refuse_at: int, waits_for_it: bool
) -> None:
    """With readers and a registering thread at once, one that gives up at any point, none is lost or doubled."""
    cached = [chunk for shard, count in enumerate(sizes) for chunk in chunks(shard, count)]
    others = chunks(9, uncached, is_cached=False)
    queue = SegmentQueue(cached, others, registers=True, waits_for_it=waits_for_it)
    taken: list[Chunk] = []

    def register() -> None:
        number = 0
        while run := queue.take_run(limit):
            if number == refuse_at:
                queue.give_back(run)
                break
            taken.extend(run)
            queue.settle()
            number += 1
        queue.close_runs()

    def read(prefers_cached: bool) -> None:
        while (chunk := queue.take(prefers_cached)) is not None:
            taken.append(chunk)

    threads = [threading.Thread(target=read, args=(bool(number % 2),)) for number in range(readers)]
    threads.append(threading.Thread(target=register))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert Counter(taken) == Counter([*cached, *others])
