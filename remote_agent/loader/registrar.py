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
from remote_agent.loader.plan import Plan, Segment
from remote_agent.loader.progress import Announce
from remote_agent.loader.registrations import Piece, Registrations, pages_of
from remote_agent.loader.ring import EVENT_DISABLE_TIMING, Lane, PinnedRing
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

    ``kept``: what is registered already, which stays its owner's.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        plan: Plan,
        target: int,
        shards: OpenShards,
        runtime: Calls,
        ring: PinnedRing,
        announce: Announce,
        kept: Registrations | None = None,
    ) -> None:
        self._headers = checkpoint.shards
        self._plan, self._target, self._shards = plan, target, shards
        self._runtime, self._ring = runtime, ring
        self._held = kept or Registrations(checkpoint.shards, runtime, announce)
        self._is_owner = kept is None
        self._sent: deque[_Sent] = deque()
        self.times: dict[str, int] = {"register": 0, "unregister": 0}

    def lock(self, shard: int) -> bool:
        """Return whether this load may send the shard; False, at once, where another one registers it.

        Raises: RegistrationRefused.
        """
        header = self._headers[shard]
        if not self._held.missing(shard, pages_of(header, 0, header.data_bytes)):
            return True
        return self._held.lock(self._shards, shard)

    def send(self, lane: Lane, chunks: Sequence[Chunk]) -> str:
        """Queue the copies of adjoining segments of a shard on a lane's stream; return the way that was taken.

        Raises: RegistrationRefused; DeviceError; LoadError (``changed``) naming the file.
        """
        first, last = chunks[0].segment, chunks[-1].segment
        whole = Segment(first.shard, first.offset, last.offset + last.length - first.offset)
        header = self._headers[whole.shard]
        missing = self._held.missing(whole.shard, pages_of(header, whole.offset, whole.length))
        pieces = list(self._plan.pieces(whole))
        try:
            is_cached = all(chunk.is_cached for chunk in chunks)
            added = self._register(whole.shard, missing, is_cached) if pieces else []
            for offset, length, target in pieces:
                place = header.data_start + whole.offset + offset
                for source, part in self._held.sources(whole.shard, place, length):
                    self._ring.copy(lane, source, self._target + target, part)
                    target += part
            for sent in added:
                self._runtime("cudaEventRecord", sent.event, lane.stream)
        except DeviceError as error:
            self._shards.check(whole.shard)  # where the file changed that is the reason, and the device found out first
            raise error
        return "mapped" if missing else "registered"

    def give_back(self, limit_bytes: int) -> None:
        """Unregister the oldest, once their copies are done, until no more than ``limit_bytes`` are registered."""
        registered = sum(sent.piece.end - sent.piece.first for sent in self._sent)
        while registered > limit_bytes:
            oldest = self._sent[0]
            self._runtime("cudaEventSynchronize", oldest.event)
            registered -= oldest.piece.end - oldest.piece.first
            self._unregister(self._sent.popleft())

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
        begun = time.monotonic_ns()
        added = []
        for piece in missing:
            if not is_cached:
                self._shards.ahead.keep_ahead(shard, piece.end, AHEAD_BYTES)
            event = self._runtime("cudaEventCreateWithFlags", EVENT_DISABLE_TIMING)
            with on_failure(partial(self._runtime, "cudaEventDestroy", event)):
                self._held.register(self._shards, shard, piece, is_cached)
            added.append(_Sent(shard, piece, event))
            self._sent.append(added[-1])
        self.times["register"] += time.monotonic_ns() - begun
        return added

    def _unregister(self, sent: _Sent) -> None:
        begun = time.monotonic_ns()
        with finally_do(partial(self._runtime, "cudaEventDestroy", sent.event)):
            self._held.give_back(sent.shard, sent.piece)
        self.times["unregister"] += time.monotonic_ns() - begun
