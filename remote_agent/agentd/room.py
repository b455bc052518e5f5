"""Room for a run's weights on a device: within its memory, and within the budgets of what may be held there.

Both are looked at before any device memory is taken. What lacks room is refused with its numbers and holders, or
idle entries go for it, the least recently used first, only as many as are needed and none for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from remote_agent.agentd import hostfacts
from remote_agent.agentd.capacity import CPU, bytes_on
from remote_agent.agentd.services import Services
from remote_agent.errors import StageError
from remote_agent.loader.problems import in_one_unit
from remote_agent.protocol.budget import Budget
from remote_agent.protocol.messages import Failure, Resident


class Room:
    """What one run needs on one device. ``check_memory``: raises StageError where so many bytes are not free."""

    def __init__(
        self,
        services: Services,
        run_uid: str,
        device: str,
        needed_bytes: int,
        budgets: Sequence[Budget],
        check_memory: Callable[[int], None],
    ) -> None:
        self._services, self._run_uid, self._device, self._needed_bytes = services, run_uid, device, needed_bytes
        self._budgets, self._check_memory = tuple(budgets), check_memory

    async def find(self, may_evict: bool) -> None:
        """See that the weights fit, and let idle entries go for them where ``may_evict``.

        Raises: StageError ``no_memory`` or ``over_budget``
        """
        residents = self._services.residents
        idle = residents.idle(self._device) if may_evict else ()
        all_idle_bytes = sum(bytes_on(held.resident, self._device) for held in idle)
        self._check(all_idle_bytes, all_idle_bytes)  # else nothing goes
        freed_bytes = 0
        for held in idle:
            try:
                self._check(freed_bytes, 0)
                return
            except StageError:
                idle_bytes = bytes_on(held.resident, self._device)
                went = await residents.let_go(held, f"run {self._run_uid} needed its room")
                # The host's own figure is read each time; a GPU's is the sampler's, which looks now and then.
                freed_bytes += idle_bytes if went and self._device != CPU else 0
        self._check(freed_bytes, 0)

    def _check(self, unseen_bytes: int, idle_bytes: int) -> None:
        """Raises: StageError unless all fits. ``unseen_bytes``: free beyond what the driver said last."""
        self._check_memory(self._needed_bytes - unseen_bytes)
        held = self._services.residents.held_besides(self._run_uid)
        check_budgets(self._device, self._needed_bytes - idle_bytes, self._total_bytes(), held, self._budgets)

    def _total_bytes(self) -> int | None:
        report = self._services.sampler.report
        gpu = next((gpu for gpu in report.gpus if gpu.uuid == self._device), None) if report else None
        if self._device == CPU or (gpu is not None and gpu.unified):
            return hostfacts.memory_bytes()[0]
        return None if gpu is None else gpu.memory_total_bytes


def check_budgets(
    device: str, needed_bytes: int, total_bytes: int | None, held: Sequence[Resident], budgets: Sequence[Budget]
) -> None:
    """See that what is held there and the weights together keep to every budget.

    ``total_bytes``: the device's memory; where the driver does not tell, a share of it is no limit.

    Raises: StageError ``over_budget`` with the bytes needed, the budget and who holds how much of it
    """
    held = [one for one in held if bytes_on(one, device)]
    held_bytes = sum(bytes_on(one, device) for one in held)
    for budget in budgets:
        limit_bytes = budget.limit_bytes(total_bytes)
        if limit_bytes is None or held_bytes + needed_bytes <= limit_bytes:
            continue
        needed, limit, taken, *each = in_one_unit(
            needed_bytes, limit_bytes, held_bytes, *(bytes_on(one, device) for one in held)
        )
        detail = (
            f"{device}: needs {needed}; of the {limit} that may be held there (hold_budget {budget.text}) "
            f"{taken} are taken"
        )
        if held:
            holders = (f"{one.recipe} of {one.owner} ({size})" for one, size in zip(held, each, strict=True))
            detail += f" by {', '.join(holders)}; release one, raise hold_budget, or set hold.make_room"
        else:
            detail += "; raise hold_budget"
        raise StageError(Failure("over_budget", detail, "preflight"))
