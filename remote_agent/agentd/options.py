"""What can be set about an agent. One frozen object, made where it starts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from remote_agent.agentd.gpu_locks import FOLDERS
from remote_agent.agentd.journal import JournalLimits
from remote_agent.agentd.sampling import SamplerTimes
from remote_agent.agentd.store import KEEP
from remote_agent.agentd.zygotes import ZygoteTimes
from remote_agent.protocol.budget import Budget


@dataclass(frozen=True)
class ClientLimits:
    """``pause_bytes``: what may wait for a client before events stay on disk; over ``drop_bytes`` it is dropped.

    So is one that takes nothing for ``stall_s``. It comes back with its cursor and misses nothing.
    One that does not say hello within ``hello_s`` is dropped.
    """

    clients: int = 64
    requests: int = 64
    pause_bytes: int = 256 << 10
    drop_bytes: int = 4 << 20
    stall_s: float = 30.0
    hello_s: float = 5.0


@dataclass(frozen=True)
class Options:
    """``watch_s``: how often the agent looks whether its state directory is still its own.

    ``keeper_s``: how often it asks the keeper what it holds and who is attached. ``lock_folders``: where the locks of
    GPUs may lie, the first that fits. ``hold_budgets``: what may be held on each device, beside what a run says.
    ``idle_s``: how long nothing must have run before processes are made ready for the next run's preflight and init.
    """

    heartbeat_s: float = 2.0
    host_sample_s: float = 1.0
    progress_s: float = 0.1
    watch_s: float = 1.0
    keeper_s: float = 1.0
    idle_s: float = 1.0
    runs_kept: int = KEEP
    devices_folder: Path = Path("/dev")
    hold_budgets: tuple[Budget, ...] = ()
    lock_folders: tuple[Path, ...] = FOLDERS
    journal: JournalLimits = field(default_factory=JournalLimits)
    sampler: SamplerTimes = field(default_factory=SamplerTimes)
    zygote: ZygoteTimes = field(default_factory=ZygoteTimes)
    clients: ClientLimits = field(default_factory=ClientLimits)
