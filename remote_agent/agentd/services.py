"""What a run needs of its agent, in one place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from remote_agent.agentd.capacity import Slots
from remote_agent.agentd.events import EventLog
from remote_agent.agentd.gpu_locks import GpuLocks
from remote_agent.agentd.parking import Parking
from remote_agent.agentd.paths import StateDir
from remote_agent.agentd.preflights import Preflights
from remote_agent.agentd.residents import Residents
from remote_agent.agentd.sampling import Sampler
from remote_agent.agentd.servers import Servers
from remote_agent.agentd.spares import Spares
from remote_agent.agentd.store import RunStore
from remote_agent.agentd.workers import Workers
from remote_agent.protocol.budget import Budget
from remote_agent.protocol.messages import Progress


class Keeper(Protocol):
    """Keeps the driver's state loaded, and weights; `keeping.KeeperLink` is one."""

    def hold(self) -> None: ...

    async def ensure(self) -> bool: ...


@dataclass(frozen=True)
class Services:
    state: StateDir
    events: EventLog
    store: RunStore
    sampler: Sampler
    slots: Slots
    gpu_locks: GpuLocks
    workers: Workers
    spares: Spares
    preflights: Preflights
    residents: Residents
    parking: Parking
    servers: Servers
    keeper: Keeper
    hold_budgets: tuple[Budget, ...]
    on_progress: Callable[[Progress], None]
