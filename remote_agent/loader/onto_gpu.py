"""Loads a checkpoint onto a GPU: one allocation, one plan, the route that page cache and policy ask for."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch

from remote_agent.errors import LoadError
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
    ceiling = device.ring.begin_ceiling()  # the link has nothing else to do before there is memory to copy to
    with on_failure(ceiling.close):
        plan = plan_placement(checkpoint)
        base = _allocate(device, plan, memory or device.allocate)
        allocated = time.monotonic_ns()
        kept = registered if policy.path in ("auto", "mapped") else None
        if kept is not None:
            route = route_registered(checkpoint, device.ring.limits)
        else:
            route = choose_route(checkpoint, shards, policy, device.runtime, device.ordinal, device.ring.limits)
        chosen = time.monotonic_ns()
        transfer = Transfer(checkpoint, plan, base.data_ptr(), device, shards, route, announce, kept)
        tensors: dict[str, torch.Tensor] = {}
        with on_failure(transfer.close):
            build = partial(_build, tensors, base, checkpoint, plan)
            views_ns, arrived = _move(transfer, build, progress, meanwhile)
            going_on = time.monotonic_ns()
            shards.check_unchanged()
            check_ns = time.monotonic_ns() - going_on
            ceiling_bytes_s = ceiling.finish()
    settling = None
    if transfer.has_to_close:
        settling = Settling(partial(_close_on, device, transfer), "load-unregister")
    else:
        transfer.close()
    moved = transfer.moved()
    steps = {"allocate": allocated - begun, "route": chosen - allocated, "move": arrived - chosen, **moved.steps}
    steps.update(views=views_ns, check=check_ns)
    return Outcome(
        tensors, moved.path, moved.reasons, steps, begun, arrived + check_ns, ceiling_bytes_s,
        {**moved.counters, **odd_counters(plan)}, base, plan, settling,
    )  # fmt: skip


def _build(tensors: dict[str, torch.Tensor], base: torch.Tensor, checkpoint: Checkpoint, plan: Plan) -> None:
    tensors.update(tensors_in(base, checkpoint, plan))


def _move(
    transfer: Transfer, build: Callable[[], None], progress: Progress, meanwhile: Callable[[], None] | None
) -> tuple[int, int]:
    """Run ``transfer``, and ``build`` while its last copies are under way; ``meanwhile`` beside it, in this thread.

    Return how many nanoseconds ``build`` took, and when the last byte had arrived.
    """
    times: list[int] = []

    def build_timed() -> None:
        begun = time.monotonic_ns()
        build()
        times.append(time.monotonic_ns() - begun)

    def run() -> None:
        transfer.run(progress, build_timed)
        times.append(time.monotonic_ns())

    if meanwhile is None:
        run()
    else:
        moving = Settling(run, "load-transfer")
        with finally_do(moving.finish):
            meanwhile()
    return times[0], times[1]


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
