"""Whoever takes, each byte is moved once."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from remote_agent.loader.plan import Segment
from remote_agent.loader.schedule import Chunk, SegmentQueue

LENGTH = 10


def stretch(shard: int, count: int, is_cached: bool = True, start: int = 0) -> list[Chunk]:
    """Return ``count`` segments of a shard as one stretch, or nothing."""
    return [Chunk(Segment(shard, LENGTH * start, LENGTH * count), is_cached)] if count else []


def queue_of(cached: Sequence[Chunk], uncached: Sequence[Chunk] = (), registers: bool = True) -> SegmentQueue:
    return SegmentQueue(cached, uncached, [0] * 10, LENGTH, registers)


def span(chunk: Chunk | None) -> tuple[int, int, int] | None:
    """Return shard, first byte and end of a chunk."""
    return None if chunk is None else (chunk.segment.shard, chunk.segment.offset, sum(chunk.segment[1:]))


def places_of(chunks: Sequence[Chunk]) -> Counter[tuple[int, int]]:
    """Return how often each byte is among ``chunks``."""
    segments = [chunk.segment for chunk in chunks]
    return Counter((one.shard, place) for one in segments for place in range(one.offset, one.offset + one.length))


def test_the_two_sides_take_from_opposite_ends() -> None:
    """Runs come from the front, as long as is allowed and half of what is left; single segments from the back."""
    queue = queue_of(stretch(0, 8))

    first = queue.take_run(30)
    queue.settle()
    last = queue.take(True)
    second = queue.take_run(1000)

    assert [span(one) for one in (first, last, second)] == [(0, 0, 30), (0, 70, 80), (0, 30, 50)]


def test_who_shares_with_nobody_takes_as_much_as_is_allowed() -> None:
    """Without readers at the other end there is nothing to leave to them."""
    queue = queue_of(stretch(0, 8))

    assert span(queue.take_run(1000, is_shared=False)) == (0, 0, 80)
    assert queue.is_empty


def test_a_run_ends_with_its_shard_and_at_a_gap() -> None:
    """One registration covers one stretch of one file."""
    queue = queue_of([*stretch(0, 2), *stretch(0, 2, start=5), *stretch(1, 9)])

    runs = [span(queue.take_run(1000, without)) for without in ((), (), (0,))]

    assert runs == [(0, 0, 20), (0, 50, 70), (1, 0, 40)]


def test_cuts_lie_at_multiples_of_the_length_in_the_file() -> None:
    """A data section that begins anywhere is cut so that no two segments share a page."""
    queue = SegmentQueue([Chunk(Segment(0, 0, 40), True)], [], [7], LENGTH, registers=True)

    assert span(queue.take_run(25)) == (0, 0, 13)
    assert span(queue.take(True)) == (0, 33, 40)
    assert span(queue.take_run(1)) == (0, 13, 23)
    assert span(queue.take(True)) == (0, 23, 33)


def test_a_read_of_a_disk_may_be_shorter() -> None:
    """It ends where it is told to, never beyond the length; what is cached is as it was."""
    queue = queue_of(stretch(1, 1), stretch(0, 3, is_cached=False))

    taken = [queue.take(False, max_bytes) for max_bytes in (4, 4, None, 1000, None)]

    assert [span(one) for one in taken] == [(0, 0, 4), (0, 4, 8), (0, 8, 10), (0, 10, 20), (0, 20, 30)]
    assert span(queue.take(False, 4)) == (1, 0, 10)


def test_readers_prefer_what_they_are_told_to() -> None:
    """Some begin with what waits for a disk, others with what is cached; each takes the other kind afterwards."""
    for prefers_cached, expected in ((True, [True, False]), (False, [False, True])):
        queue = queue_of(stretch(0, 1), stretch(1, 1, is_cached=False), registers=False)

        taken = [queue.take(prefers_cached) for _ in range(3)]

        assert [chunk.is_cached for chunk in taken if chunk is not None] == expected
        assert taken[2] is None


def test_what_is_given_back_is_read() -> None:
    """A reader waits for what is held, and gets it when it is given back."""
    queue = queue_of(stretch(0, 2))
    held = queue.take_run(1000, is_shared=False)
    assert held is not None
    taken: list[Chunk] = []
    reader = threading.Thread(target=lambda: taken.extend(iter(lambda: queue.take(True), None)))
    reader.start()
    queue.give_back(held)
    queue.close_runs()
    reader.join()

    assert sorted(map(span, taken)) == [(0, 0, 10), (0, 10, 20)]  # type: ignore[type-var]


def test_a_stopped_queue_gives_nothing_out() -> None:
    """Once a load is given up nobody begins anything."""
    queue = queue_of(stretch(0, 9), stretch(1, 9, is_cached=False))

    queue.stop()

    assert queue.take_run(1000) is None
    assert queue.take(True) is None


@given(
    sizes=st.lists(st.integers(0, 120), max_size=4),
    starts=st.lists(st.integers(0, 25), min_size=10, max_size=10),
    uncached=st.integers(0, 120),
    readers=st.integers(1, 4),
    limit=st.integers(1, 60),
    refuse_at=st.integers(0, 20),
    max_bytes=st.none() | st.integers(1, 30),
)
def test_each_byte_is_taken_once_whoever_is_faster(
    sizes: list[int],
    starts: list[int],
    uncached: int,
    readers: int,
    limit: int,
    refuse_at: int,
    max_bytes: int | None,
) -> None:
    """With readers and a registering thread at once, one that gives up at any point, none is lost or doubled."""
    cached = [Chunk(Segment(shard, 0, size), True) for shard, size in enumerate(sizes) if size]
    others = [Chunk(Segment(9, 0, uncached), False)] if uncached else []
    queue = SegmentQueue(cached, others, starts, LENGTH, registers=True)
    taken: list[Chunk] = []
    read: list[Chunk] = []

    def register() -> None:
        number = 0
        while (run := queue.take_run(limit)) is not None:
            if number == refuse_at:
                queue.give_back(run)
                break
            taken.append(run)
            queue.settle()
            number += 1
        queue.close_runs()

    def fill(prefers_cached: bool) -> None:
        while (chunk := queue.take(prefers_cached, max_bytes)) is not None:
            read.append(chunk)

    threads = [threading.Thread(target=fill, args=(bool(number % 2),)) for number in range(readers)]
    threads.append(threading.Thread(target=register))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert places_of([*taken, *read]) == places_of([*cached, *others])
    for (shard, offset, length), _ in read:
        first = starts[shard] + offset
        assert first // LENGTH == (first + length - 1) // LENGTH
    assert queue.is_empty
