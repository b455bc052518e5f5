"""Maps a resident that the keeper lends, and gives its tensors by name: what a worker and an attacher both do."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from remote_agent.agentd import hostfacts
from remote_agent.errors import ResidentLostError
from remote_agent.keeper.client import KeeperAddress, lease
from remote_agent.loader.header_text import TensorEntry
from remote_agent.protocol.internal import Manifest
from remote_agent.resident.checksum import sampled_checksum
from remote_agent.resident.manifest import ReadManifest, decode_head, read_entries, read_parts

if TYPE_CHECKING:
    import torch

MapShared = Callable[[int, int, Callable[[], None]], "torch.Tensor"]
"""A device's `map_shared`."""


@dataclass(frozen=True)
class OpenResident:
    """Tensors to read, and the lease, which ends when none of them is left. ``steps``: nanoseconds by name."""

    manifest: Manifest
    tensors: dict[str, torch.Tensor]
    lease: socket.socket
    steps: dict[str, int]


@dataclass(frozen=True)
class Lent:
    """A resident that is not mapped yet: manifest and table of tensors, both unread, its memory and the lease."""

    name: str
    head: bytes
    table: bytes
    descriptor: int
    lease: socket.socket

    def read_manifest(self, before: ReadManifest | None = None) -> Manifest:
        """Return its manifest; ``before`` is one that was read already. It takes longer than to get it.

        Raises: ResidentLostError if it is not of this name and this boot
        """
        manifest = before.manifest if before is not None and before.head == self.head else decode_head(self.head)
        if manifest.name != self.name:
            raise ResidentLostError(f"{self.name}: its manifest is of {manifest.name}")
        if manifest.boot_id != hostfacts.boot_id():
            raise ResidentLostError(f"{self.name}: was loaded before this boot of the host")
        return manifest


def open_resident(
    address: KeeperAddress, name: str, map_shared: MapShared, verify: bool, before: ReadManifest | None = None
) -> OpenResident:
    """Return a resident mapped here; with ``verify`` its samples agree with what was loaded.

    ``before``: its manifest, where it was read already.
    Raises: KeeperError, ResidentLostError where it can't be used, DeviceError where nothing could be
    """
    begun = time.monotonic_ns()
    with borrow(address, name) as lent:
        manifest, link = lent.read_manifest(before), lent.lease
        fetched = time.monotonic_ns()
        memory = map_shared(lent.descriptor, manifest.size_bytes, link.close)
    mapped = time.monotonic_ns()
    tensors = views(memory, read_entries(manifest, lent.table))
    viewed = time.monotonic_ns()
    if verify and sampled_checksum(memory, manifest.size_bytes) != manifest.checksum:
        raise ResidentLostError(f"{name}: the checksum of its samples is not that of what was loaded")
    checked = time.monotonic_ns()
    steps = {"fetch": fetched - begun, "map": mapped - fetched, "views": viewed - mapped, "verify": checked - viewed}
    return OpenResident(manifest, tensors, link, steps)


@contextlib.contextmanager
def borrow(address: KeeperAddress, name: str, meanwhile: Callable[[], None] = lambda: None) -> Iterator[Lent]:
    """Give what the keeper lends; its descriptor is closed afterwards, and the lease too where the block raises.

    ``meanwhile`` is done while the keeper finds it.
    Raises: KeeperError, ResidentLostError if that is no resident, and whatever ``meanwhile`` does
    """
    link, reply = lease(address, name, meanwhile)
    try:
        if len(reply.descriptors) != 2:
            raise ResidentLostError(f"{name}: came with {len(reply.descriptors)} descriptors instead of 2")
        manifest, memory = reply.descriptors
        yield Lent(name, *read_parts(manifest), memory, link)
    except BaseException:
        link.close()
        raise
    finally:
        reply.close()


def views(memory: torch.Tensor, entries: Sequence[TensorEntry]) -> dict[str, torch.Tensor]:
    """Return each tensor as a view of ``memory``."""
    from remote_agent.loader.views import views_in

    return views_in(memory, [(entry, entry.start) for entry in entries])
