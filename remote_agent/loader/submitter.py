"""The one thread of a load that makes CUDA calls: it sends full buffers and registered pages, and gives buffers back.

In turn, so that neither waits long for the other: every buffer that readers have filled, then the next piece of
the page cache, which is registered first where it is not already.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from remote_agent.loader.problems import shown
from remote_agent.loader.progress import INTERVAL_S
from remote_agent.loader.registrations import RegistrationRefused

if TYPE_CHECKING:
    from remote_agent.loader.headers import Header
    from remote_agent.loader.plan import Plan
    from remote_agent.loader.progress import Progress, Tally
    from remote_agent.loader.registrar import Registrar
    from remote_agent.loader.ring import Buffer, PinnedRing
    from remote_agent.loader.schedule import Chunk, SegmentQueue
    from remote_agent.loader.staged import Full, Readers

WAYS = ("registered", "mapped", "staged", "direct")


class Submitter:
    """Sends for one load. ``maps``: pages are registered, and with ``maps_alone`` readers are started only for what
    can't be.

    ``sent``: bytes by way. ``refusals`` says why pages were not registered. ``times``: nanoseconds by step.
    """

    def __init__(
        self,
        headers: Sequence[Header],
        plan: Plan,
        ring: PinnedRing,
        segments: SegmentQueue,
        tally: Tally,
        readers: Readers,
        registrar: Registrar,
        maps: bool,
        maps_alone: bool,
    ) -> None:
        self._headers, self._plan, self._ring = headers, plan, ring
        self._segments, self._tally, self._readers, self._registrar = segments, tally, readers, registrar
        self._maps, self._maps_alone = maps, maps_alone
        self._base = 0
        self._has_readers = False
        self._reading = 0
        self._elsewhere: set[int] = set()
        self._on_their_way: deque[tuple[Any, list[Buffer]]] = deque()
        self._turn = 0
        self.sent = dict.fromkeys(WAYS, 0)
        self.refusals: list[str] = []
        self.times = {"copy": 0, "idle": 0}

    def begin(self, start_readers: Callable[[], int]) -> None:
        """Have readers begin, where any are wanted by now; ``start_readers`` does it and returns how many there are."""
        if not self._maps:
            self._segments.close_runs()
        if not self._has_readers and not (self._maps and self._maps_alone) and not self._segments.is_empty:
            self._reading, self._has_readers = start_readers(), True

    def run(self, base: int, start_readers: Callable[[], int], progress: Progress) -> None:
        """Queue every copy to memory at ``base``, or return early where a reader failed, which `Tally.error` tells.

        Raises: DeviceError, LoadError, or what ``progress`` raised.
        """
        self._base = base
        progress(0, self._tally.total)
        told = time.monotonic()
        while not self._tally.stop.is_set():
            self.begin(start_readers)
            has_sent = self._send_full(0)
            self._give_back()
            if self._maps:
                has_sent = self._send_pages() or has_sent
            if not has_sent and not self._maps:
                if not self._reading and self._segments.is_empty:
                    break
                self._wait()
            if time.monotonic() - told > INTERVAL_S:
                told = time.monotonic()
                progress(self._tally.done, self._tally.total)

    def _wait(self) -> None:
        """Wait until a buffer is full, or where readers have none to fill until one has been sent."""
        begun = time.monotonic_ns()
        if self._on_their_way and self._readers.free.empty():
            self._ring.wait(self._on_their_way[0][0])
            self._give_back()
            self.times["idle"] += time.monotonic_ns() - begun
        else:
            self._send_full(INTERVAL_S)

    def _send_full(self, timeout_s: float) -> bool:
        """Queue the copies out of full buffers; return whether there were any, waited for where there is time."""
        begun = time.monotonic_ns()
        stream = self._ring.buffer_streams[self._turn]
        buffers: list[Buffer] = []
        full_buffers = self._readers.full
        with contextlib.suppress(queue.Empty):
            if timeout_s:
                try:
                    full = full_buffers.get(timeout=timeout_s)
                finally:
                    waited = time.monotonic_ns()
                    self.times["idle"] += waited - begun
                    begun = waited
            else:
                full = full_buffers.get_nowait()
            while True:
                if full is None:
                    self._reading -= 1
                else:
                    self._send(full, stream)
                    buffers.append(full.buffer)
                full = full_buffers.get_nowait()
        if buffers:
            event = buffers[-1].event
            self._ring.record(event, stream)
            self._on_their_way.append((event, buffers))
            self._turn = (self._turn + 1) % len(self._ring.buffer_streams)
            self.times["copy"] += time.monotonic_ns() - begun
        return bool(buffers)

    def _send(self, full: Full, stream: Any) -> None:
        for offset, length, target in self._plan.pieces(full.segment):
            self._ring.copy(stream, full.buffer.address + offset, self._base + target, length)
        self._count(full.way, full.segment.length)

    def _give_back(self) -> None:
        """Let readers have the buffers out of which every copy is over."""
        while self._on_their_way and self._ring.is_over(self._on_their_way[0][0]):
            for buffer in self._on_their_way.popleft()[1]:
                self._readers.free.put(buffer)

    def _send_pages(self) -> bool:
        """Register and send one piece; return False, and never try again, once nothing is left or it is refused."""
        limit_bytes = self._ring.limits.registration_bytes
        chunk = self._segments.take_run(limit_bytes, self._elsewhere, is_shared=not self._maps_alone)
        if chunk is not None and self._send_piece(chunk):
            return True
        self._maps = False
        self._segments.close_runs()
        return False

    def _send_piece(self, chunk: Chunk) -> bool:
        shard = chunk.segment.shard
        try:
            if not self._registrar.lock(shard):
                name = shown(self._headers[shard].path.name)
                self._refuse(chunk, f"registration refused: {name} is registered by another load")
                self._elsewhere.add(shard)
                return True
            way = self._registrar.send(self._ring.pages_stream, chunk, self._base)
        except RegistrationRefused as refusal:
            self._refuse(chunk, str(refusal))
            return False
        self._segments.settle()
        self._count(way, chunk.segment.length)
        return True

    def _refuse(self, chunk: Chunk, why: str) -> None:
        self.refusals.append(why)
        self._segments.give_back(chunk)

    def _count(self, way: str, length: int) -> None:
        self.sent[way] += length
        self._tally.add(length)
