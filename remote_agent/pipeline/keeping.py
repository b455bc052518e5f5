"""What a job finds at the keeper, and what it leaves there."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from remote_agent.agentd import hostfacts
from remote_agent.agentd.paths import StateDir
from remote_agent.errors import (
    AgentError,
    DeviceError,
    KeeperError,
    KeeperGoneError,
    NotArmableError,
    ResidentLostError,
)
from remote_agent.keeper.client import KeeperAddress, ask, list_residents
from remote_agent.loader.header_text import TensorEntry
from remote_agent.pipeline.imports import installed_versions
from remote_agent.protocol.internal import Manifest, ShardIdentity, WorkerGo, WorkerJob
from remote_agent.resident.manifest import write_manifest
from remote_agent.resident.opening import Lent, MapShared, OpenResident, borrow, open_resident

if TYPE_CHECKING:
    import torch

    from remote_agent.devices import Device
    from remote_agent.resident.checksum import Samples
    from remote_agent.resident.memory import SharedMemory
    from remote_agent.resident.reserved import ReservedRange


@dataclass(frozen=True)
class Keepable:
    """Weights in sealed memory and what a manifest says of them."""

    memory: SharedMemory
    entries: tuple[TensorEntry, ...]
    checksum: str
    tensor_bytes: int
    shards: tuple[ShardIdentity, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Backing:
    """What stands behind a model's weights besides the process that has them.

    ``keepable``: what the keeper can be given. ``is_kept``: the keeper has it, ``size_bytes`` of memory.
    ``problem``: why it can't have them, where it was meant to. ``range``: where they lie, so that they can be unmapped
    and mapped again; ``checksum``: of what lies there.
    """

    keepable: Keepable | None = None
    is_kept: bool = False
    size_bytes: int | None = None
    problem: str | None = None
    range: ReservedRange | None = None
    checksum: str | None = None


class Keeping:
    """The keeper, as far as one job is concerned with it."""

    def __init__(self, job: WorkerJob, go: WorkerGo) -> None:
        self._job, self._go = job, go
        self._lease: socket.socket | None = None
        self.name = go.resident

    @property
    def has_weights(self) -> bool:
        """Whether the keeper is said to have what this job needs."""
        return self._go.is_resident and self.name is not None

    def attach(self, device: Device) -> tuple[OpenResident, ReservedRange]:
        """Return the resident and where it is mapped; its lease is open until `detach`.

        Raises: KeeperError, ResidentLostError, DeviceError
        """
        ranges: list[ReservedRange] = []

        def map_anywhere(descriptor: int, size_bytes: int, on_gone: Callable[[], None]) -> torch.Tensor:
            ranges.append(device.reserve(size_bytes, stand_in=False))
            return map_into(ranges[0], descriptor, size_bytes, on_gone)

        return self._open(map_anywhere), ranges[0]

    def attach_again(self, reserved: ReservedRange, checksum: str | None) -> dict[str, int]:
        """Map the resident where its tensors are expected and return nanoseconds by step; it has no lease then.

        Raises: KeeperError, DeviceError, ResidentLostError if the keeper has it no more or has another
        """
        opened = self._open(partial(map_into, reserved))
        if opened.manifest.checksum != checksum:
            raise ResidentLostError(f"{self.name}: the keeper has other weights by that name now")
        self.detach()
        return opened.steps

    def is_there(self) -> bool:
        """Whether the keeper has it now."""
        try:
            return any(one.name == self.name for one in list_residents(self._address()))
        except KeeperError:
            return False

    def _open(self, map_shared: MapShared) -> OpenResident:
        assert self.name is not None
        opened = open_resident(self._address(), self.name, map_shared, verify=True)
        self._check(opened.manifest)
        self._lease = opened.lease
        return opened

    def attach_under(
        self, reserved: ReservedRange, table: bytes, samples: Samples, use: Callable[[], None]
    ) -> tuple[Manifest, dict[str, int]]:
        """Map the resident at a range where tensors expect it to be laid out as ``table`` says; leased until `detach`.

        ``use`` may queue work on the device as soon as it is mapped: whether it is the right one is looked at while
        the device works, and when this raises what came of it is worth nothing.
        Returns its manifest and nanoseconds by step. Raises: NotArmableError if it is laid out otherwise; KeeperError,
        ResidentLostError, DeviceError. When this raises the stand-in lies there, as before.
        """
        assert self.name is not None
        clock = time.monotonic_ns
        unmap_ns = 0

        def clear() -> None:
            nonlocal unmap_ns
            at = clock()
            reserved.unmap(stand_in=False)
            unmap_ns = clock() - at

        begun = clock()
        with reserved.or_stand_in(), borrow(self._address(), self.name, clear) as lent:
            if lent.table != table:
                self._check(lent.read_manifest())
                raise NotArmableError(f"{self.name} is laid out otherwise than a load would lay it out now")
            fetched = clock()
            steps = self._map(reserved, lent)
            mapped = clock()
            samples.queue()  # before the work, or they would wait for it
            use()
            used = clock()
            manifest = self._read(lent, reserved)
            if samples.checksum() != manifest.checksum:
                raise ResidentLostError(f"{self.name}: the checksum of its samples is not that of what was loaded")
            self._lease = lent.lease
        around = {"fetch": fetched - begun - unmap_ns, "use": used - mapped, "verify": clock() - used}
        return manifest, {**steps, **around, "unmap": unmap_ns}

    def _map(self, reserved: ReservedRange, lent: Lent) -> dict[str, int]:
        try:
            return reserved.map(lent.descriptor, reserved.size_bytes, lent.lease.close)
        except DeviceError:
            self._read(lent, reserved)  # its size may be why
            raise

    def _read(self, lent: Lent, reserved: ReservedRange) -> Manifest:
        manifest = lent.read_manifest()
        self._check(manifest)
        if manifest.size_bytes != reserved.size_bytes:
            text = f"{self.name} takes {manifest.size_bytes} bytes, a load would take {reserved.size_bytes} now"
            raise NotArmableError(text)
        return manifest

    def _check(self, manifest: Manifest) -> None:
        if manifest.shards != self._go.shards or manifest.device != self._job.device:
            raise ResidentLostError(f"{self.name}: its manifest is of other files or another device")

    def detach(self) -> None:
        """End the lease though the map stays: from now on agentd knows this process as a holder."""
        if self._lease is not None:
            self._lease.close()

    def drop(self) -> None:
        """Let the keeper forget what can't be used; nothing where it is gone already."""
        try:
            ask(self._address(), f"drop! {self.name}")
        except AgentError:
            pass

    def keep(self, weights: Keepable) -> None:
        """Give the keeper the weights. Raises: KeeperError, DeviceError, StateDirError"""
        if self.name is None:
            raise KeeperGoneError("no keeper was named to this worker")
        address, manifest = self._address(), self._manifest(weights)
        descriptors: list[int] = []
        try:
            descriptors.append(write_manifest(manifest, weights.entries))
            descriptors.append(weights.memory.export())
            ask(address, f"put {self.name}", descriptors)
        except OSError as error:
            raise KeeperError(f"the manifest can't be written: {error.strerror}") from error
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _address(self) -> KeeperAddress:
        if self._job.state_directory is None:
            raise KeeperGoneError("no keeper was named to this worker")
        return KeeperAddress(StateDir(Path(self._job.state_directory)))

    def _manifest(self, weights: Keepable) -> Manifest:
        recipe = self._job.recipe
        assert self.name is not None
        return Manifest(
            name=self.name,
            run_uid=self._job.run_uid,
            recipe=recipe.name,
            model=recipe.model.path,
            shards=weights.shards,
            device=self._job.device,
            boot_id=hostfacts.boot_id(),
            owner=self._job.owner,
            size_bytes=weights.memory.size_bytes,
            tensor_bytes=weights.tensor_bytes,
            created_wall_ns=time.time_ns(),
            ttl_s=recipe.hold.ttl_s,
            checksum=weights.checksum,
            versions=installed_versions(),
            notes=weights.notes,
        )


def map_into(reserved: ReservedRange, descriptor: int, size_bytes: int, on_gone: Callable[[], None]) -> torch.Tensor:
    """Map memory at a range, as `Device.map_shared` does anywhere. Raises: ResidentLostError, DeviceError"""
    reserved.map(descriptor, size_bytes, on_gone)
    return reserved.tensor
