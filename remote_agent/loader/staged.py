"""The ``staged`` path: threads read into pinned buffers, copies go on from there while they read on.

One stream a thread, an event a buffer. Memory comes from torch's allocator on the caller's
stream, so every lane first waits for an event recorded there: its last user may still run.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from remote_agent.errors import DeviceError, LoadError
from remote_agent.loader.checkpoint import Checkpoint
from remote_agent.loader.plan import Plan, Segment, cut_segments
from remote_agent.loader.progress import Progress, Tally
from remote_agent.loader.ring import Lane, PinnedRing
from remote_agent.loader.shards import OpenShards

if TYPE_CHECKING:
    from remote_agent.devices.cuda import CudaDevice


def copy_staged(
    checkpoint: Checkpoint, plan: Plan, target: int, device: CudaDevice, shards: OpenShards, progress: Progress
) -> dict[str, int]:
    """Bring every planned byte to ``target``, a device address, and return nanoseconds by step, summed over threads.

    When it returns or raises, no copy is under way and no thread of it is alive.
    Raises: LoadError, DeviceError, or what ``progress`` raised.
    """
    ring = device.ring
    segments = cut_segments(checkpoint, ring.buffer_bytes)
    if not segments:
        return {}
    tally = Tally(sum(segment.length for segment in segments))
    with ring.mark(device.current_stream()) as event:
        work = _Work(plan, target, ring, shards, segments, event, tally)
        lanes = ring.lanes[: len(segments)]
        threads = [
            threading.Thread(target=work.run, args=(lane,), name=f"staged-{number}", daemon=True)
            for number, lane in enumerate(lanes)
        ]
        started: list[threading.Thread] = []
        try:
            for thread in threads:
                thread.start()
                started.append(thread)
        except RuntimeError as error:  # those that run must end first
            tally.fail(LoadError(f"thread {len(started) + 1} of {len(threads)} could not be started: {error}"))
        try:
            tally.watch(started, progress)
        except BaseException as error:
            tally.fail(error)
            for thread in started:
                thread.join()
            _drain_after(ring, error)
            raise
        ring.drain()
    return work.steps()


class _Work:
    """What the threads of one load share."""

    def __init__(
        self,
        plan: Plan,
        target: int,
        ring: PinnedRing,
        shards: OpenShards,
        segments: Sequence[Segment],
        event: Any,
        tally: Tally,
    ) -> None:
        self._plan = plan
        self._target = target
        self._ring = ring
        self._shards = shards
        self._segments = segments
        self._event = event
        self._tally = tally
        self._next = count()
        self._times: list[dict[str, int]] = []

    def run(self, lane: Lane) -> None:
        """Move segments until there are none left; a thread's body, so it never raises."""
        times: dict[str, int] = defaultdict(int)
        self._times.append(times)
        try:
            self._ring.enter(lane, self._event)
            for turn, segment in enumerate(self._take()):
                self._move(lane, turn, segment, times)
                self._tally.add(segment.length)
        except BaseException as error:
            self._tally.fail(error)

    def steps(self) -> dict[str, int]:
        """Return the nanoseconds of each step, summed over the threads."""
        return {step: sum(times[step] for times in self._times) for step in ("wait", "read", "copy")}

    def _take(self) -> Iterator[Segment]:
        while not self._tally.stop.is_set():
            number = next(self._next)
            if number >= len(self._segments):
                return
            yield self._segments[number]

    def _move(self, lane: Lane, turn: int, segment: Segment, times: dict[str, int]) -> None:
        buffer = lane.buffers[turn % len(lane.buffers)]
        begun = time.monotonic_ns()
        self._ring.acquire(buffer)
        free = time.monotonic_ns()
        self._shards.read(segment.shard, segment.offset, buffer.view[: segment.length])
        full = time.monotonic_ns()
        for offset, length, target in self._plan.pieces(segment):
            self._ring.copy(lane, buffer.address + offset, self._target + target, length)
        self._ring.record(lane, buffer)
        times["wait"] += free - begun
        times["read"] += full - free
        times["copy"] += time.monotonic_ns() - full


def _drain_after(ring: PinnedRing, error: BaseException) -> None:
    """Wait for what is queued; a failure here is the same one again, or follows from it."""
    try:
        ring.drain()
    except DeviceError as second:
        error.__context__ = error.__context__ or second
