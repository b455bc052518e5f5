"""What a node is, and what is held on it."""

from __future__ import annotations

from typing import Literal

from remote_agent.protocol.checks import address
from remote_agent.protocol.records import dataclass
from remote_agent.protocol.states import Tier


@dataclass(frozen=True)
class Finding:
    """Something an operator should know that is not a state of a run."""

    code: str
    severity: Literal["info", "warning", "error"]
    text: str


@dataclass(frozen=True)
class GpuProcess:
    pid: int
    memory_bytes: int | None
    name: str | None = None


@dataclass(frozen=True)
class Gpu:
    """One GPU as NVML describes it. ``unified``: memory is the host's own (GB10 and kin).

    ``memory_reserved_bytes``: of what is used, the driver's own. ``memory_unexplained_bytes``: at least so much of it
    has neither a process that shows on the host nor a warm model of this agent; only an agent tells it.
    """

    uuid: str
    index: int
    name: str
    minor: int | None = None
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    unified: bool = False
    utilisation: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    mig: bool | None = None
    compute_mode: str | None = None
    persistence: bool | None = None
    ecc_uncorrected: int | None = None
    compute_capability: str | None = None
    processes: tuple[GpuProcess, ...] = ()
    memory_reserved_bytes: int | None = None
    memory_unexplained_bytes: int | None = None


@dataclass(frozen=True)
class Probe:
    """The host at a glance. ``sampler`` says where the GPU facts come from: ``nvml``, or why there are none."""

    hostname: str
    kernel: str
    cpu_count: int
    memory_total_bytes: int
    memory_available_bytes: int
    sampler: Literal["nvml", "absent", "hung", "starting", "failed"]
    driver_version: str | None = None
    cuda_version: str | None = None
    gpus: tuple[Gpu, ...] = ()
    findings: tuple[Finding, ...] = ()
    duration_ns: int = 0


@dataclass(frozen=True)
class Server:
    """A process of this node that has a model attached, and has answered at ``host`` and ``port``."""

    recipe: str
    run_uid: str
    entry: str
    host: str
    port: int
    pid: int
    since_wall_ns: int

    @property
    def address(self) -> str:
        return address(self.host, self.port)


@dataclass(frozen=True)
class Resident:
    """A warm model on a device of this node and the process that holds it; ``pid`` is None where only the keeper does.

    ``name``: what the keeper calls its weights, where it has them; ``attached``: how many processes use those,
    ``servers``: which of them are this node's own.
    ``host_bytes``: what it takes of the host's memory while it is parked.
    """

    run_uid: str
    recipe: str
    model: str
    device: str
    tier: Tier
    bytes: int
    pid: int | None
    owner: str
    since_wall_ns: int
    ttl_s: float | None = None
    name: str | None = None
    attached: int = 0
    host_bytes: int = 0
    servers: tuple[Server, ...] = ()
