"""``remote_agent.attach``: a resident model's tensors in a serving process, without a copy.

The tensors are read-only: a kernel that writes them fails in its own process, on a CPU a write ends it. That is a
rail, not a boundary. Whoever is attached keeps the memory: it is freed when the last of them has gone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Union

import torch

from remote_agent.agentd.paths import StateDir, default_root
from remote_agent.devices import open_device
from remote_agent.devices.calls import Calls
from remote_agent.devices.cpu import CpuDevice
from remote_agent.devices.cuda import DRIVER, visible_uuids
from remote_agent.errors import (
    AgentError,
    DeviceError,
    KeeperError,
    KeeperGoneError,
    KeeperRefusedError,
    NotResidentError,
    ResidentLostError,
)
from remote_agent.keeper.client import KeeperAddress, ask, list_residents
from remote_agent.loader.checkpoint import inspect
from remote_agent.loader.load import load as load_checkpoint
from remote_agent.loader.problems import shown
from remote_agent.protocol.internal import Manifest
from remote_agent.protocol.messages import WeightsPolicy
from remote_agent.resident.gpu_memory import GpuSpace
from remote_agent.resident.gpu_shared import map_descriptor
from remote_agent.resident.manifest import ReadManifest, read_manifest
from remote_agent.resident.opening import MapShared, open_resident

__all__ = ["AgentError", "Attached", "KeeperError", "NotResidentError", "ResidentLostError", "attach"]

AnyPath = Union[str, "os.PathLike[str]"]


class Attached:
    """A model's tensors by name. ``name`` and ``device`` are the resident's.

    ``is_resident`` is False where the model was loaded instead, and ``reason`` says why. ``steps``: nanoseconds.
    """

    def __init__(
        self,
        name: str,
        device: str,
        tensors: dict[str, torch.Tensor],
        steps: Mapping[str, int],
        reason: str | None = None,
    ) -> None:
        self.name, self.device, self.steps, self.reason = name, device, steps, reason
        self.is_resident = reason is None
        self._tensors: dict[str, torch.Tensor] | None = tensors

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the tensors. Raises: ValueError after `close`"""
        if self._tensors is None:
            raise ValueError(f"{self.name} is closed")
        return MappingProxyType(self._tensors)

    def close(self) -> None:
        """Let the tensors go; map and lease end with the last one that is used elsewhere. Safe to call again."""
        self._tensors = None

    def __enter__(self) -> Attached:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def attach(
    model: AnyPath,
    *,
    device: str | None = None,
    private: Iterable[str] = (),
    verify: bool = True,
    state_dir: AnyPath | None = None,
    socket: AnyPath | None = None,
    load: bool = False,
    fallback: AnyPath | None = None,
) -> Attached:
    """Return the tensors of a resident model; nothing is copied but what ``private`` names, to be written.

    ``model``: the name of the recipe that loaded it, the model's path, or the resident's own name. ``device``: ``cpu``,
    ``cuda:N`` as this process counts, or a UUID; needed where a model is resident on several. ``verify``: compare a
    sampled checksum.
    The keeper is found in ``state_dir`` (default: this user's), or at ``socket``, which it has for other users.
    Where the model is not resident or is lost, ``fallback``, a checkpoint's path, is loaded; with ``load`` it is
    ``model`` itself.
    Raises: NotResidentError naming what is resident, ResidentLostError, KeeperError if the keeper does not let this
    process in, DeviceError if the device can't be used, ValueError for a private name that is no tensor's.
    """
    address = KeeperAddress(
        Path(socket) if socket is not None else StateDir(Path(state_dir) if state_dir else default_root(os.environ))
    )
    wanted = None if device is None else _uuid_of(device)
    instead = model if load and fallback is None else fallback
    try:
        return _with_private(_attach(address, os.fspath(model), wanted, verify), private)
    except (NotResidentError, ResidentLostError) as error:
        if instead is None:
            raise
        reason = str(error)
    # Not while the error is handled: its traceback keeps memory that was lost mapped, beside what is loaded.
    return _with_private(_load(Path(instead), device, reason), private)


def _attach(address: KeeperAddress, model: str, device: str | None, verify: bool) -> Attached:
    before = _find(address, model, device)
    manifest = before.manifest
    map_shared = CpuDevice().map_shared if manifest.device == "cpu" else gpu_mapper(manifest.device)
    try:
        opened = open_resident(address, manifest.name, map_shared, verify, before)
    except KeeperRefusedError as refusal:
        if str(refusal).startswith("no resident"):
            raise NotResidentError(f"{manifest.name} was released just now") from refusal
        raise
    return Attached(manifest.name, manifest.device, opened.tensors, opened.steps)


def _find(address: KeeperAddress, model: str, device: str | None) -> ReadManifest:
    there, unusable = _manifests(address)
    named = [one for one in there if _is_called(one.manifest, model) and device in (None, one.manifest.device)]
    if len(named) == 1:
        _require_unchanged(named[0].manifest, model)
        return named[0]
    manifests = [one.manifest for one in (named or there)]
    listed = ", ".join(f"{one.name} ({one.recipe}, {one.model})" for one in manifests)
    if named:
        text = f"{model} is resident {len(named)} times, name one or a device: {listed}"
    else:
        where = f" on {device}" if device else ""
        text = f"{model} is not resident{where}; resident is: {listed or 'nothing'}"
        text += "".join(f"; {why}" for why in unusable)
    raise NotResidentError(text, tuple(one.name for one in manifests))


def _manifests(address: KeeperAddress) -> tuple[list[ReadManifest], list[str]]:
    """Return every resident's manifest, and why others can't be used; one that goes meanwhile is nobody's model."""
    try:
        names = [one.name for one in list_residents(address)]
    except KeeperGoneError as error:
        raise NotResidentError(f"nothing is resident: {error}") from error
    found, unusable = [], []
    for name in names:
        try:
            reply = ask(address, f"show {name}")
        except KeeperRefusedError:
            continue
        try:
            manifest = read_manifest(reply.descriptors[0])
        except ResidentLostError as error:
            unusable.append(f"{name} can't be used: {error}")
            continue
        finally:
            reply.close()
        if manifest.manifest.name == name:
            found.append(manifest)
        else:
            unusable.append(f"{name} can't be used: its manifest is of {shown(manifest.manifest.name, 200)}")
    return found, unusable


def _is_called(manifest: Manifest, model: str) -> bool:
    if model in (manifest.name, manifest.recipe):
        return True
    return "/" in model and _absolute(model) == _absolute(manifest.model)


def _require_unchanged(manifest: Manifest, model: str) -> None:
    """Raises: NotResidentError where a path is asked for, and what lies there now is not what was loaded.

    Files that are gone, or that this process does not see, are no reason: weights outlive them. Another mount of the
    same files has numbers of its own, so sizes and modification times are compared alone.
    """
    if model in (manifest.name, manifest.recipe):
        return
    for shard in manifest.shards:
        try:
            now = Path(shard.path).stat()
        except (OSError, ValueError):
            continue
        if (now.st_size, now.st_mtime_ns) != (shard.size_bytes, shard.mtime_ns):
            text = f"{model} is not resident as it is now: {shown(shard.path, 400)} changed since it was loaded"
            raise NotResidentError(f"{text} as {manifest.name}", (manifest.name,))


def _absolute(path: str) -> Path:
    try:
        return Path(path).expanduser().resolve()
    except (OSError, RuntimeError, ValueError):
        return Path(path)


def _uuid_of(device: str) -> str:
    """Return ``cpu`` or the UUID of the GPU that this process knows as ``device``. Raises: DeviceError"""
    if not device.startswith("cuda"):
        return device
    number = device.partition(":")[2] or "0"
    uuids = visible_uuids(Calls(DRIVER))
    if not number.isdigit() or int(number) >= len(uuids):
        raise DeviceError(f"{device}: this process sees {len(uuids)} GPU(s)", "cuDeviceGetCount", "no_device")
    return uuids[int(number)]


def gpu_mapper(uuid: str) -> MapShared:
    """Return what maps memory of the GPU ``uuid`` here. Raises: DeviceError if this process does not see it"""
    driver = Calls(DRIVER)
    uuids = visible_uuids(driver)
    if uuid not in uuids:
        text = f"{uuid} is not visible to this process; it sees {', '.join(uuids) or 'no GPU'}"
        raise DeviceError(text, "cuDeviceGetUuid", "no_device")
    ordinal = uuids.index(uuid)
    try:
        torch.empty(1, device=torch.device("cuda", ordinal))  # opens the context as torch wants it
    except (RuntimeError, AssertionError) as error:
        raise DeviceError(f"torch can't use {uuid}: {error}", "torch.cuda.init", "torch") from error
    synchronise: Callable[[], None] = lambda: torch.cuda.synchronize(ordinal)  # noqa: E731
    return partial(map_descriptor, GpuSpace(driver, ordinal, synchronise))


def _load(path: Path, device: str | None, reason: str) -> Attached:
    """Return the checkpoint's tensors, loaded by this process for itself. Raises: CheckpointError, LoadError"""
    name = device or ("cuda:0" if torch.cuda.is_available() else "cpu")
    checkpoint = inspect(path.expanduser())
    there = open_device(name)
    there.initialise()
    there.open_context()
    try:
        loaded = load_checkpoint(checkpoint, there, WeightsPolicy(), progress=lambda done, total: None)
    finally:
        there.close()
    return Attached(str(path), name, loaded.tensors, loaded.steps, f"loaded: {reason}")


def _with_private(found: Attached, private: Iterable[str]) -> Attached:
    names = (private,) if isinstance(private, str) else tuple(private)
    tensors = dict(found.tensors)
    unknown = [name for name in names if name not in tensors]
    if unknown:
        raise ValueError(f"private: {found.name} has no tensor {', '.join(map(repr, unknown[:5]))}")
    if found.is_resident:
        tensors.update({name: tensors[name].clone() for name in names})
    return Attached(found.name, found.device, tensors, found.steps, found.reason)
