"""The ``mapped`` path of a GPU: pieces of shards are registered, and copied from where they lie.

No byte is copied on the host. What is registered already, by a process that kept it, is copied without
more ado (``registered``); the rest is registered first, and given back when the load is over.
Where another process registers a shard, readers move it: nobody waits.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from remote_agent.errors import DeviceError
from remote_agent.loader.checkpoint import Checkpoint
from remote_agent.loader.cleanup import finally_do, on_failure
from remote_agent.loader.plan import Plan
from remote_agent.loader.progress import Announce
from remote_agent.loader.registrations import Piece, Registrations, pages_of
from remote_agent.loader.ring import EVENT_DISABLE_TIMING, PinnedRing
from remote_agent.loader.schedule import Chunk
from remote_agent.loader.shards import OpenShards

if TYPE_CHECKING:
    from remote_agent.devices.calls import Calls

AHEAD_BYTES = 256 << 20
"""How far a disk works ahead of registrations, where ``mapped`` is asked for and pages are not cached."""


@dataclass
class _Sent:
    """A piece that this load registered; ``event`` marks the end of the copies out of it."""

    shard: int
    piece: Piece
    event: Any


class Registrar:
    """Registers and copies for one load; used by one thread, then closed by the one that started it.

    ``kept``: what is registered already, which stays its owner's. ``limit_bytes``: the most of its own that stays
    registered at once; None for no limit.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        plan: Plan,
        shards: OpenShards,
        runtime: Calls,
        ring: PinnedRing,
        announce: Announce,
        kept: Registrations | None = None,
        limit_bytes: int | None = None,
    ) -> None:
        self._headers = checkpoint.shards
        self._plan, self._shards = plan, shards
        self._runtime, self._ring = runtime, ring
        self._held = kept or Registrations(checkpoint.shards, runtime, announce)
        self._is_owner = kept is None
        self._limit_bytes = limit_bytes
        self._open: set[int] = set()
        self._sent: deque[_Sent] = deque()
        self.registrations = 0
        self.times: dict[str, int] = {"register": 0, "unregister": 0}

    @property
    def has_own(self) -> bool:
        """Return whether `close` has anything to give back."""
        return self._is_owner and self._held.count > 0

    def lock(self, shard: int) -> bool:
        """Return whether this load may send the shard; False, at once, where another one registers it.

        Raises: RegistrationRefused.
        """
        if shard in self._open:
            return True
        header = self._headers[shard]
        missing = self._held.missing(shard, pages_of(header, 0, header.data_bytes))
        if missing and not self._held.lock(self._shards, shard):
            return False
        self._open.add(shard)
        return True

    def unlock(self) -> None:
        """Let other processes register the shards, once this one registers no more; what it registered stays."""
        for shard in self._open if self._is_owner else ():
            self._held.unlock(shard)

    def send(self, stream: Any, chunk: Chunk, base: int) -> str:
        """Queue the copies of a stretch of a shard to memory at ``base``; return the way that was taken.

        Raises: RegistrationRefused; DeviceError; LoadError (``changed``) naming the file.
        """
        segment = chunk.segment
        header = self._headers[segment.shard]
        missing = self._held.missing(segment.shard, pages_of(header, segment.offset, segment.length))
        pieces = list(self._plan.pieces(segment))
        try:
            added = self._register(segment.shard, missing, chunk.is_cached) if pieces else []
            for offset, length, target in pieces:
                place = header.data_start + segment.offset + offset
                for source, part in self._held.sources(segment.shard, place, length):
                    self._ring.copy(stream, source, base + target, part)
                    target += part
            for sent in added:
                self._ring.record(sent.event, stream)
            self._give_back()
        except DeviceError as error:
            self._shards.check(segment.shard)  # a file that changed is the reason, and the device found out first
            raise error
        return "mapped" if missing else "registered"

    def close(self) -> None:
        """Give back what this load registered for itself, even when a call fails; every copy must be over.

        Raises: the first DeviceError or OSError.
        """
        sent, self._sent = list(self._sent), deque()
        with finally_do(
            *(partial(self._runtime, "cudaEventDestroy", one.event) for one in sent),
            *([self._held.close] if self._is_owner else []),
        ):
            pass

    def _register(self, shard: int, missing: Sequence[Piece], is_cached: bool) -> list[_Sent]:
        """Register what is missing; return those that need an event, since they are given back during the load."""
        begun = time.monotonic_ns()
        added = []
        for piece in missing:
            if not is_cached:
                self._shards.ahead.keep_ahead(shard, piece.end, AHEAD_BYTES)
            if self._limit_bytes is None:
                self._held.register(self._shards, shard, piece, is_cached)
                continue
            event = self._runtime("cudaEventCreateWithFlags", EVENT_DISABLE_TIMING)
            with on_failure(partial(self._runtime, "cudaEventDestroy", event)):
                self._held.register(self._shards, shard, piece, is_cached)
            added.append(_Sent(shard, piece, event))
            self._sent.append(added[-1])
        self.registrations += len(missing)
        self.times["register"] += time.monotonic_ns() - begun
        return added

    def _give_back(self) -> None:
        """Unregister the oldest, once their copies are done, until no more than the limit are registered."""
        registered = sum(sent.piece.end - sent.piece.first for sent in self._sent)
        while self._limit_bytes is not None and registered > self._limit_bytes:
            oldest = self._sent.popleft()
            registered -= oldest.piece.end - oldest.piece.first
            begun = time.monotonic_ns()
            with finally_do(partial(self._runtime, "cudaEventDestroy", oldest.event)):
                self._ring.wait(oldest.event)
                self._held.give_back(oldest.shard, oldest.piece)
            self.times["unregister"] += time.monotonic_ns() - begun
