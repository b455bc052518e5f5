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
from remote_agent.resident.manifest import ReadManifest, read_entries, read_manifest

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
    """A resident that is not mapped yet: its manifest, its table of tensors unread, its memory and the lease."""

    manifest: Manifest
    table: bytes
    descriptor: int
    lease: socket.socket


def open_resident(
    address: KeeperAddress, name: str, map_shared: MapShared, verify: bool, before: ReadManifest | None = None
) -> OpenResident:
    """Return a resident mapped here; with ``verify`` its samples agree with what was loaded.

    ``before``: its manifest, where it was read already.
    Raises: KeeperError, ResidentLostError where it can't be used, DeviceError where nothing could be
    """
    begun = time.monotonic_ns()
    with borrow(address, name, before) as lent:
        fetched = time.monotonic_ns()
        manifest, link = lent.manifest, lent.lease
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
def borrow(address: KeeperAddress, name: str, before: ReadManifest | None = None) -> Iterator[Lent]:
    """Give what the keeper lends; its descriptor is closed afterwards, and the lease too where the block raises.

    ``before``: its manifest, where it was read already.
    Raises: KeeperError, ResidentLostError if it is not of this name and this boot
    """
    link, reply = lease(address, name)
    try:
        manifest, _, table = read_manifest(reply.descriptors[0], before)
        check_manifest(manifest, name, len(reply.descriptors))
        yield Lent(manifest, table, reply.descriptors[1], link)
    except BaseException:
        link.close()
        raise
    finally:
        reply.close()


def check_manifest(manifest: Manifest, name: str, descriptors: int) -> None:
    """Raises: ResidentLostError if the manifest is not of this resident and this boot."""
    if manifest.name != name:
        raise ResidentLostError(f"{name}: its manifest is of {manifest.name}")
    if manifest.boot_id != hostfacts.boot_id():
        raise ResidentLostError(f"{name}: was loaded before this boot of the host")
    if descriptors != 2:
        raise ResidentLostError(f"{name}: came with {descriptors} descriptors instead of 2")


def views(memory: torch.Tensor, entries: Sequence[TensorEntry]) -> dict[str, torch.Tensor]:
    """Return each tensor as a view of ``memory``."""
    from remote_agent.loader.views import views_in

    return views_in(memory, [(entry, entry.start) for entry in entries])
