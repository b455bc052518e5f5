"""Messages between agentd and its own children on one host: preflight, zygote, worker, park child, sampler.

One message a frame: ``{"type": NAME, ...fields}`` over a socket pair. Both ends are
of one version, except the keeper, whose few words never change (see `keeper`).
"""

from __future__ import annotations

import json
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Union

from remote_agent.protocol.codec import DecodeError, decode, encode
from remote_agent.protocol.framing import ProtocolError, frame
from remote_agent.protocol.messages import Failure, Finding, Gpu, Recipe, StageStatus, Tier


@dataclass(frozen=True)
class ShardIdentity:
    """What a shard must still be after its last byte was read. Times in nanoseconds."""

    path: str
    device: int
    inode: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int


@dataclass(frozen=True)
class Manifest:
    """What a resident is, beside its memory at the keeper; where each tensor lies stands behind it (see `manifest`).

    ``device``: ``cpu`` or a GPU UUID. ``size_bytes`` is the memory's, ``tensor_bytes`` the tensors' own.
    ``checksum`` is of samples (see `checksum`). ``versions``: of the packages that loaded it.
    """

    name: str
    run_uid: str
    recipe: str
    model: str
    shards: tuple[ShardIdentity, ...]
    device: str
    boot_id: str
    owner: str
    size_bytes: int
    tensor_bytes: int
    created_wall_ns: int
    ttl_s: float | None
    checksum: str
    versions: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.tensor_bytes <= self.size_bytes or not self.size_bytes:
            raise ValueError(f"size_bytes: {self.size_bytes} bytes can't hold tensors of {self.tensor_bytes}")


@dataclass(frozen=True)
class PreflightReport:
    """The preflight child's only message."""

    ok: bool
    shards: tuple[ShardIdentity, ...]
    bytes: int
    tensors: int
    cached_bytes: int | None
    failure: Failure | None
    extra: Mapping[str, Union[int, float, str, bool, None]] = field(default_factory=dict)


@dataclass(frozen=True)
class ZygoteReady:
    """Imports are done. ``fingerprint_paths``: directories whose change means other packages."""

    pid: int
    python: str
    versions: Mapping[str, str]
    import_ns: int
    threads: int
    fingerprint_paths: tuple[str, ...]


@dataclass(frozen=True)
class ZygoteFork:
    """Fork a worker. Sent with two descriptors: the worker's socket and its stderr."""

    environment: Mapping[str, str]
    preimport: tuple[str, ...] = ()


@dataclass(frozen=True)
class ZygoteForked:
    """``pid`` is an orphan: agentd, the child subreaper, is its parent now."""

    pid: int


@dataclass(frozen=True)
class ZygoteRefused:
    """Forking would not be safe; agentd spawns a fresh worker and the run says why."""

    reason: str


@dataclass(frozen=True)
class WorkerJob:
    """One run on one device (``cpu`` or a GPU UUID). The descriptor beside it is the run's log.

    ``init_mono_ns``: when agentd asked for the worker, where the ``init`` stage starts.
    ``state_directory``: where the keeper is found that may have the weights; ``owner``: whose they are there.
    ``arm``: make all that the weights do not decide, and wait for them.
    """

    run_uid: str
    recipe: Recipe
    device: str
    init_mono_ns: int
    cache_directory: str
    zygote_reason: str | None = None
    state_directory: str | None = None
    owner: str = ""
    arm: bool = False


@dataclass(frozen=True)
class WorkerPrepare:
    """Do what stage ``init`` does, before there is a job: all but a context. ``model``: whose code to import."""

    device: str
    model: str


@dataclass(frozen=True)
class WorkerPrepared:
    """The answer to `WorkerPrepare`; with a ``problem`` nothing is ready, and a job would start from nothing."""

    problem: str | None = None


@dataclass(frozen=True)
class WorkerGo:
    """Preflight has passed: the device may be touched now.

    ``resident``: the name under which the keeper has these weights (``is_resident``), or may be given them.
    ``registered_bytes``: of the host's memory, what workers keep registered of other files.
    """

    shards: tuple[ShardIdentity, ...]
    resident: str | None = None
    is_resident: bool = False
    registered_bytes: int = 0


@dataclass(frozen=True)
class WorkerAttach:
    """Build the job's model around the weights that the keeper has; with ``serves``, call the recipe's entry point.

    The descriptor beside it is the log.
    """

    job: WorkerJob
    go: WorkerGo
    serves: bool = False


@dataclass(frozen=True)
class WorkerAttached:
    """The model can be asked, or its entry point is called now. ``steps``: nanoseconds by name."""

    steps: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class WorkerAsk:
    """Send the held model its recipe's request."""


@dataclass(frozen=True)
class WorkerAnswer:
    """What came of `WorkerAsk`; both times count from its arrival."""

    first_output_ns: int
    total_ns: int
    output: str


@dataclass(frozen=True)
class WorkerStage:
    """A stage of this worker began (``end_mono_ns`` None) or is over."""

    stage: str
    status: StageStatus
    start_mono_ns: int
    end_mono_ns: int | None = None
    bytes: int | None = None
    rate_bytes_s: float | None = None
    ceiling_bytes_s: float | None = None
    path: str | None = None
    reason: str | None = None
    extra: Mapping[str, Union[int, float, str, bool, None]] = field(default_factory=dict)


@dataclass(frozen=True)
class WorkerProgress:
    stage: str
    done: int
    total: int | None
    unit: str = "bytes"
    rate_bytes_s: float | None = None
    ceiling_bytes_s: float | None = None


@dataclass(frozen=True)
class WorkerMaps:
    """From now on this worker may touch pages of ``path``: where it dies of a signal, that is where to look."""

    stage: str
    path: str


@dataclass(frozen=True)
class WorkerFinding:
    finding: Finding


@dataclass(frozen=True)
class WorkerReady:
    """Every stage is done and the model is held. ``first_output_mono_ns`` is a point in time, if there was an output.

    ``tier`` is ``standby`` where the worker holds it, ``armed`` where it waits for its weights. ``resident``: what the
    keeper has it as, if it has it.
    Without ``is_held`` nobody holds anything: the bytes are in the page cache, which the kernel keeps.
    """

    first_output_mono_ns: Union[int, None]
    output: str
    tier: Tier
    bytes: int
    resident: str | None = None
    is_held: bool = True


@dataclass(frozen=True)
class WorkerLostResident:
    """What the keeper had as ``resident`` could not be used; it was dropped."""

    resident: str
    reason: str


@dataclass(frozen=True)
class WorkerFailed:
    failure: Failure


@dataclass(frozen=True)
class WorkerLetsGo:
    """What this process holds is of no use any more; it ends by itself."""

    reason: str


@dataclass(frozen=True)
class WorkerRelease:
    """Let go of the model and exit."""


@dataclass(frozen=True)
class WorkerUnmap:
    """Let go of the weights' memory and of nothing else: the driver is about to checkpoint this process.

    ``host_room_bytes``: what the host can take of the device memory that stays.
    """

    host_room_bytes: int


@dataclass(frozen=True)
class WorkerUnmapped:
    """No memory of others is mapped here any more; or, with a ``problem``, nothing was touched.

    ``device_bytes``: what this process has on its device beside the weights that went.
    """

    device_bytes: int
    steps: Mapping[str, int] = field(default_factory=dict)
    problem: str | None = None


@dataclass(frozen=True)
class WorkerMap:
    """Map the weights again, from the keeper; `WorkerFailed` where it has them no more."""


@dataclass(frozen=True)
class WorkerMapped:
    """Everything is where it was before `WorkerUnmap`. ``steps``: nanoseconds by name."""

    steps: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class ParkJob:
    """The first message to a park child: have the driver take a process off its device, or put it back."""

    pid: int
    action: Literal["park", "unpark"]
    lock_timeout_ms: int = 10_000


@dataclass(frozen=True)
class ParkReady:
    """The driver can; nothing was touched yet. A park child that waits to be told `ParkGo`."""


@dataclass(frozen=True)
class ParkGo:
    """The process is ready for its checkpoint."""


@dataclass(frozen=True)
class ParkReport:
    """A park child's last message: how the process was left. ``steps``: nanoseconds by name (``lock_ns``, …).

    ``lost``: its CUDA state can't be had back. ``failure``: why it is not where it was meant to be.
    """

    state: Literal["running", "parked", "lost"]
    steps: Mapping[str, int] = field(default_factory=dict)
    failure: Failure | None = None


@dataclass(frozen=True)
class GpuXid:
    """An error that the driver told of a GPU, by NVIDIA's number for its kind."""

    uuid: str
    xid: int


@dataclass(frozen=True)
class SamplerReport:
    """One look at every GPU. ``status`` is ``absent`` where there is no NVIDIA driver.

    ``xids``: what happened since the report before.
    """

    status: str
    t_mono_ns: int
    driver_version: str | None = None
    cuda_version: str | None = None
    gpus: tuple[Gpu, ...] = ()
    findings: tuple[Finding, ...] = ()
    xids: tuple[GpuXid, ...] = ()


InternalMessage = Union[
    PreflightReport, ZygoteReady, ZygoteFork, ZygoteForked, ZygoteRefused, WorkerJob, WorkerPrepare, WorkerPrepared,
    WorkerGo, WorkerAttach, WorkerAttached, WorkerAsk, WorkerAnswer, WorkerStage, WorkerProgress, WorkerMaps,
    WorkerFinding, WorkerReady, WorkerLostResident, WorkerFailed, WorkerLetsGo, WorkerRelease, WorkerUnmap,
    WorkerUnmapped, WorkerMap, WorkerMapped, ParkJob, ParkReady, ParkGo, ParkReport, SamplerReport,
]  # fmt: skip

_TYPES: dict[str, type] = {cls.__name__: cls for cls in typing.get_args(InternalMessage)}


def dump(message: InternalMessage) -> bytes:
    """Return ``message`` as one frame."""
    return frame(json.dumps({"type": type(message).__name__, **encode(message)}, separators=(",", ":")).encode())


def parse(line: bytes) -> InternalMessage:
    """Return the message of one frame. Raises: ProtocolError if it is none."""
    try:
        content = json.loads(line)
        cls = _TYPES[content.pop("type")]
        message: InternalMessage = decode(cls, content)
        return message
    except (ValueError, KeyError, AttributeError, TypeError, DecodeError) as error:
        raise ProtocolError(f"not a message between agentd and its children: {line[:80]!r}") from error
