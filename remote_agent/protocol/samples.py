"""What is only of the moment: sent without a number, and dropped where a reader is slow."""

from __future__ import annotations

from remote_agent.protocol.records import dataclass


@dataclass(frozen=True)
class Progress:
    """How far a running stage is. ``done`` and ``total`` are bytes when ``unit`` is ``bytes``."""

    run_uid: str
    stage: str
    done: int
    total: int | None
    unit: str = "bytes"
    rate_bytes_s: float | None = None
    ceiling_bytes_s: float | None = None


@dataclass(frozen=True)
class GpuSample:
    """``None`` stands for what the driver does not tell, never 0. Utilisation in percent, power in watts."""

    uuid: str
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    utilisation: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None


@dataclass(frozen=True)
class HostSample:
    memory_total_bytes: int
    memory_available_bytes: int
    load_1m: float
    gpus: tuple[GpuSample, ...] = ()


@dataclass(frozen=True)
class Sample:
    """At most one of the two; may be dropped, carries no ``seq``."""

    t_mono_ns: int
    t_wall_ns: int
    progress: Progress | None = None
    host: HostSample | None = None


@dataclass(frozen=True)
class Heartbeat:
    t_mono_ns: int
    newest_seq: int
