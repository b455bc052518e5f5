"""Moves every planned byte to a GPU along a route: one thread that registers, readers, all on one queue.

Memory comes from an allocator on the caller's stream, so every stream first waits for an event
recorded there: the memory's last user may still run. When a transfer returns or raises, no copy is
under way, no thread of it is alive, and nothing is registered, mapped, locked or open.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from remote_agent.errors import LoadError
from remote_agent.loader.checkpoint import Checkpoint
from remote_agent.loader.cleanup import finally_do
from remote_agent.loader.direct import DirectShards
from remote_agent.loader.plan import Plan
from remote_agent.loader.problems import shown
from remote_agent.loader.progress import Announce, Progress, Tally
from remote_agent.loader.registrar import Registrar
from remote_agent.loader.registrations import RegistrationRefused, Registrations
from remote_agent.loader.ring import Lane
from remote_agent.loader.route import Route
from remote_agent.loader.schedule import Chunk, SegmentQueue
from remote_agent.loader.shards import OpenShards
from remote_agent.loader.staged import Readers

if TYPE_CHECKING:
    from remote_agent.devices.cuda import CudaDevice

WAYS = ("registered", "mapped", "staged", "direct")


@dataclass
class Moved:
    """What a transfer did. ``steps``: nanoseconds, summed over threads; ``path``: the ways that bytes went by."""

    steps: dict[str, int]
    counters: dict[str, int]
    reasons: list[str]

    @property
    def path(self) -> str:
        return "+".join(way for way in WAYS if self.counters[f"{way}_bytes"]) or "staged"


class Transfer:
    """One transfer; `run` it once, in any thread, then `close` it, which gives back all registrations but ``kept``."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        plan: Plan,
        target: int,
        device: CudaDevice,
        shards: OpenShards,
        route: Route,
        announce: Announce,
        kept: Registrations | None = None,
    ) -> None:
        self._checkpoint, self._route = checkpoint, route
        self._ring = device.ring
        self._stream = device.current_stream()
        self._limits = self._ring.limits
        total = sum(chunk.segment.length for chunk in (*route.cached, *route.uncached))
        self._tally = Tally(total)
        self._queue = SegmentQueue(route.cached, route.uncached, route.maps, route.maps_alone)
        self._direct = DirectShards(checkpoint.shards, shards) if route.reads_direct else None
        self._readers = Readers(
            checkpoint.shards, plan, target, self._ring, shards, self._queue, self._tally, self._direct,
            route.reads_all_direct,
        )  # fmt: skip
        self._registrar = Registrar(checkpoint, plan, target, shards, device.runtime, self._ring, announce, kept)
        self._refusals: list[str] = []
        self._sent = {"registered": 0, "mapped": 0}
        self._registrations = 0

    def run(self, progress: Progress) -> None:
        """Move every byte and wait for the last copy.

        Raises: LoadError, DeviceError, or what ``progress`` raised.
        """
        route, ring = self._route, self._ring
        if not route.cached and not route.uncached:
            return
        with contextlib.ExitStack() as stack:
            lanes = stack.enter_context(ring.use(route.cut))
            event = stack.enter_context(ring.mark(self._stream))
            bodies: list[tuple[str, Callable[[], None]]] = []
            if route.maps and route.cached:
                lane = stack.enter_context(ring.make_stream())
                bodies.append(("mapped", partial(self._map, lane, event)))
            else:
                self._queue.close_runs()
            bodies += self._reader_bodies(lanes, event)
            with finally_do(ring.drain):
                self._run_threads(bodies, progress)

    def close(self) -> None:
        """Give back whatever is still registered, mapped, locked or open; every copy must be over."""
        with finally_do(self._registrar.close, *([self._direct.close] if self._direct is not None else [])):
            pass

    def moved(self) -> Moved:
        """Return what was done, once `run` has returned."""
        reasons = [*self._route.reasons, *dict.fromkeys(self._refusals)]
        if self._direct is not None and self._direct.refusal is not None:
            reasons.append(f"{self._direct.refusal}; read through the page cache")
        counters = {
            **{f"{way}_bytes": count for way, count in self._sent.items()},
            "staged_bytes": self._readers.moved("staged"),
            "direct_bytes": self._readers.moved("direct"),
            "registrations": self._registrations,
            "registrations_refused": len(self._refusals),
            **self._route.counters,
        }
        return Moved({**self._readers.steps(), **self._registrar.times}, counters, reasons)

    def _reader_bodies(self, lanes: Sequence[Lane], event: Any) -> Iterator[tuple[str, Callable[[], None]]]:
        """Yield a body for each lane that can get a segment; some prefer cached ones, so that both kinds move."""
        count = len(self._route.cached) + len(self._route.uncached)
        cached_first = 0 if self._route.maps else self._limits.mixed.threads
        for number, lane in enumerate(lanes[:count]):
            is_first = number < cached_first or not self._route.uncached
            yield f"reader-{number}", partial(self._readers.run, lane, is_first, event)

    def _run_threads(self, bodies: Sequence[tuple[str, Callable[[], None]]], progress: Progress) -> None:
        """Run every body in a thread and return once all have ended. Raises: the first failure of any."""
        started: list[threading.Thread] = []
        try:
            for name, body in bodies:
                thread = threading.Thread(target=body, name=f"load-{name}", daemon=True)
                thread.start()
                started.append(thread)
        except RuntimeError as error:  # those that run must end first
            self._tally.fail(LoadError(f"thread {len(started) + 1} of {len(bodies)} could not be started: {error}"))
            self._queue.stop()
        try:
            self._tally.watch(started, progress)
        finally:
            self._queue.stop()
            for thread in started:
                thread.join()

    def _map(self, lane: Lane, event: Any) -> None:
        """Register and copy until nothing is left or it is refused; a thread's body, so it never raises."""
        try:
            self._ring.enter(lane, event)
            self._map_runs(lane)
        except BaseException as error:
            self._tally.fail(error)
            self._queue.stop()
        finally:
            self._queue.close_runs()

    def _map_runs(self, lane: Lane) -> None:
        elsewhere: set[int] = set()
        while not self._tally.stop.is_set():
            chunks = self._queue.take_run(self._limits.registration_bytes, elsewhere)
            if not chunks:
                return
            shard = chunks[0].segment.shard
            try:
                if not self._registrar.lock(shard):
                    name = shown(self._checkpoint.shards[shard].path.name)
                    self._refuse(chunks, f"registration refused: {name} is registered by another load")
                    elsewhere.add(shard)
                    continue
                way = self._registrar.send(lane, chunks)
            except RegistrationRefused as refusal:
                self._refuse(chunks, str(refusal))
                return
            self._queue.settle()
            length = sum(chunk.segment.length for chunk in chunks)
            self._registrations += way == "mapped"
            self._sent[way] += length
            self._tally.add(length)
            if self._limits.registered_bytes is not None:
                self._registrar.give_back(self._limits.registered_bytes)

    def _refuse(self, chunks: Sequence[Chunk], why: str) -> None:
        self._refusals.append(why)
        self._queue.give_back(chunks)
