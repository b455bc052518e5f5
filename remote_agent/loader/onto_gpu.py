"""Loads a checkpoint onto a GPU: one allocation, one plan, the route that page cache and policy ask for."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch

from remote_agent.errors import LoadError
from remote_agent.loader.ceiling import Ceiling
from remote_agent.loader.checkpoint import Checkpoint
from remote_agent.loader.cleanup import Settling, finally_do, on_failure
from remote_agent.loader.outcome import Memory, Outcome, odd_counters, tensors_in
from remote_agent.loader.plan import Plan, plan_placement
from remote_agent.loader.progress import Announce, Progress
from remote_agent.loader.registrations import Registrations
from remote_agent.loader.route import choose_route, route_registered
from remote_agent.loader.shards import OpenShards
from remote_agent.loader.transfer import Transfer
from remote_agent.protocol.messages import WeightsPolicy

if TYPE_CHECKING:
    from remote_agent.devices.cuda import CudaDevice


def load_onto_gpu(
    checkpoint: Checkpoint,
    device: CudaDevice,
    policy: WeightsPolicy,
    shards: OpenShards,
    progress: Progress,
    announce: Announce,
    memory: Memory | None,
    meanwhile: Callable[[], None] | None,
    registered: Registrations | None,
) -> Outcome:
    """Return every tensor of ``checkpoint`` on ``device``.

    Raises: LoadError naming the file, DeviceError, or what ``progress`` or ``meanwhile`` raised.
    """
    begun = time.monotonic_ns()
    kept = registered if policy.path in ("auto", "mapped") else None
    mover = _Mover(checkpoint, device, policy, shards, announce, kept)
    with on_failure(mover.close):
        if meanwhile is None:
            mover.begin()
        allocating = time.monotonic_ns()
        base = _allocate(device, mover.plan, memory or device.allocate)
        mover.steps["allocate"] = time.monotonic_ns() - allocating
        place = base.data_ptr(), device.current_stream()
        tensors: dict[str, torch.Tensor] = {}
        build = partial(_build, tensors, base, checkpoint, mover.plan, mover.steps)
        if meanwhile is None:
            mover.run(*place, progress, build)
        else:
            moving = Settling(partial(mover.begin_and_run, *place, progress), "load-transfer")
            with finally_do(moving.finish):
                meanwhile()
                build()
    transfer = mover.transfer
    settling = None
    if transfer.has_to_close:
        settling = Settling(partial(_close_on, device, transfer), "load-unregister", begins=False)
    else:
        transfer.close()
    moved = transfer.moved()
    return Outcome(
        tensors, moved.path, moved.reasons, {**mover.steps, **moved.steps}, begun, mover.ended_ns,
        mover.ceiling_bytes_s, {**moved.counters, **odd_counters(mover.plan)}, base, mover.plan, settling,
    )  # fmt: skip


class _Mover:
    """What moves the bytes of one load, in one thread, which may be another one than the caller's.

    ``steps``: nanoseconds by step. After `run`: the open ``transfer``, the link's ceiling, when every byte was there.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: CudaDevice,
        policy: WeightsPolicy,
        shards: OpenShards,
        announce: Announce,
        kept: Registrations | None,
    ) -> None:
        self._checkpoint, self._device, self._policy = checkpoint, device, policy
        self._shards, self._announce, self._kept = shards, announce, kept
        self._ceiling: Ceiling | None = None
        self._transfer: Transfer | None = None
        self.plan = plan_placement(checkpoint)
        self.steps: dict[str, int] = {}
        self.ceiling_bytes_s = 0.0
        self.ended_ns = 0

    @property
    def transfer(self) -> Transfer:
        assert self._transfer is not None
        return self._transfer

    def begin(self) -> None:
        """Measure the link, choose the route, have readers begin: none of that needs memory to copy to."""
        begun = time.monotonic_ns()
        device = self._device
        device.runtime("cudaSetDevice", device.ordinal)
        if self._kept is None or self._kept.ceiling_bytes_s is None:
            self._ceiling = device.ring.begin_ceiling()
        else:  # its copies would come before the load's own, which nothing keeps from beginning at once
            self.ceiling_bytes_s = self._kept.ceiling_bytes_s
        choosing = time.monotonic_ns()
        limits = device.ring.limits
        if self._kept is not None:
            route = route_registered(self._checkpoint, limits)
        else:
            route = choose_route(self._checkpoint, self._shards, self._policy, device.runtime, device.ordinal, limits)
        self.steps.update(ring=choosing - begun, route=time.monotonic_ns() - choosing)
        self._transfer = Transfer(self._checkpoint, self.plan, device, self._shards, route, self._announce, self._kept)
        self._transfer.begin()

    def run(self, base: int, stream: int, progress: Progress, meanwhile: Callable[[], None]) -> None:
        """Move every byte to ``base``, memory of ``stream``; ``meanwhile`` is called once every copy is queued."""
        begun = time.monotonic_ns()
        self.transfer.run(base, stream, progress, meanwhile)
        arrived = time.monotonic_ns()
        self._shards.check_unchanged()
        self.ended_ns = time.monotonic_ns()
        if self._ceiling is not None:
            self.ceiling_bytes_s = self._ceiling.finish()
        self.steps.update(move=arrived - begun, check=self.ended_ns - arrived)

    def begin_and_run(self, base: int, stream: int, progress: Progress) -> None:
        self.begin()
        self.run(base, stream, progress, lambda: None)

    def close(self) -> None:
        """Give back what a load that failed leaves; every copy must be over."""
        closing = [one.close for one in (self._transfer, self._ceiling) if one is not None]
        with finally_do(*closing):
            pass


def _build(
    tensors: dict[str, torch.Tensor], base: torch.Tensor, checkpoint: Checkpoint, plan: Plan, steps: dict[str, int]
) -> None:
    begun = time.monotonic_ns()
    tensors.update(tensors_in(base, checkpoint, plan))
    steps["views"] = time.monotonic_ns() - begun


def _close_on(device: CudaDevice, transfer: Transfer) -> None:
    """Close from any thread: each has a device of its own."""
    with finally_do(transfer.close):
        device.runtime("cudaSetDevice", device.ordinal)


def _allocate(device: CudaDevice, plan: Plan, memory: Memory) -> torch.Tensor:
    try:
        return memory(plan.size_bytes)
    except torch.OutOfMemoryError as error:
        free, total = device.memory()
        text = f"{device.name}: {plan.size_bytes} bytes are needed, {free} of {total} are free"
        raise LoadError(text, "out_of_memory") from error
