"""Every type that crosses the wire, frozen; the one place where they are defined.

Times: ``*_mono_ns`` is the host's CLOCK_MONOTONIC, ``*_wall_ns`` is its Unix
time, ``start_ns`` counts from the acceptance of ``run.start``. Sizes are bytes.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, Union

from remote_agent.protocol.budget import parse_budget
from remote_agent.protocol.codec import Checked
from remote_agent.protocol.version import FRAME_LIMIT_BYTES as FRAME_LIMIT_BYTES
from remote_agent.protocol.version import PROTOCOL_MAX as PROTOCOL_MAX
from remote_agent.protocol.version import PROTOCOL_MIN as PROTOCOL_MIN

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DEVICE = re.compile(r"auto|all|cpu|cuda:\d{1,4}|(GPU|MIG)-[0-9A-Fa-f-]{8,64}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ENTRY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_HOST = re.compile(r"[A-Za-z0-9.:_-]{1,253}")


def _outside(name: str, value: int, most: int) -> Iterator[str]:
    if not 1 <= value <= most:
        yield f"{name}: {value} is not within 1..{most}"


def _not_whole(name: str, path: str | None) -> Iterator[str]:
    if path is not None and (not path.startswith(("/", "~/")) or "\0" in path):
        yield f"{name}: {path[:80]!r} must be a whole path on the host, or begin with ~/"


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _not_url_path(name: str, path: str) -> Iterator[str]:
    if not re.fullmatch(r"/[!-~]*", path):
        yield f"{name}: {path[:80]!r} is no path of a URL: it begins with /, without blanks"


class Tier(str, enum.Enum):
    """How warm a model is on a node, coldest first.

    ``armed``: a process has all of it but the weights, which the keeper has when a run starts from there.
    """

    COLD = "cold"
    CACHED = "cached"
    HOST = "host"
    RESIDENT = "resident"
    ARMED = "armed"
    PARKED = "parked"
    STANDBY = "standby"


class RunState(str, enum.Enum):
    """Where a run stands, as its host says it."""

    QUEUED = "queued"
    RUNNING = "running"
    READY = "ready"
    FAILED = "failed"
    CANCELLED = "cancelled"
    INTERRUPTED = "interrupted"
    STUCK = "stuck"

    @property
    def is_terminal(self) -> bool:
        return self not in (RunState.QUEUED, RunState.RUNNING)


class StageStatus(str, enum.Enum):
    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"
    REUSED = "reused"
    SKIPPED = "skipped"
    FAILED = "failed"

    @property
    def is_over(self) -> bool:
        return self not in (StageStatus.PENDING, StageStatus.RUNNING)


NATIVE_STAGES = (
    "queue",
    "probe",
    "preflight",
    "init",
    "context",
    "weights",
    "assign",
    "compile",
    "first_request",
    "hold",
)
"""Canonical order of a native run's stages; attribution follows it."""

STAGES = (*NATIVE_STAGES, "listening")
"""All of them in order: what follows ``hold`` belongs to recipes that serve, and to no other."""


# --- recipes ---------------------------------------------------------------


@dataclass(frozen=True)
class ModelSource(Checked):
    """A checkpoint on the host: a directory, or one ``.safetensors`` file."""

    path: str
    revision: str | None = None
    adapter: Literal["native", "engine"] = "native"

    def value_problems(self) -> Iterator[str]:
        if not self.path or "\0" in self.path:
            yield "path: must name a file or directory on the host"


@dataclass(frozen=True)
class WeightsPolicy:
    """How bytes reach the device, and what a load leaves in the page cache."""

    path: Literal["auto", "mapped", "staged", "direct"] = "auto"
    page_cache: Literal["keep", "bypass"] = "keep"


@dataclass(frozen=True)
class CompilePolicy:
    """``off`` warms kernels only; ``layer`` compiles the repeated layer."""

    mode: Literal["off", "layer", "model"] = "off"
    cache_directory: str | None = None


@dataclass(frozen=True)
class Shape(Checked):
    """One input shape to warm: ``batch`` sequences of ``tokens`` tokens."""

    batch: int = 1
    tokens: int = 128

    def value_problems(self) -> Iterator[str]:
        yield from _outside("batch", self.batch, 4096)
        yield from _outside("tokens", self.tokens, 1 << 20)


@dataclass(frozen=True)
class Sampling(Checked):
    """Temperature 0 is greedy."""

    temperature: float = 0.0
    seed: int = 0

    def value_problems(self) -> Iterator[str]:
        if not 0 <= self.temperature <= 100:
            yield f"temperature: {self.temperature} is not within 0..100"


@dataclass(frozen=True)
class FirstRequest(Checked):
    """The one real request that proves readiness.

    With ``prompt`` the checkpoint's tokenizer is used; without it ``prompt_tokens``
    ids are drawn deterministically from the vocabulary. ``shapes`` are warmed before.
    """

    kind: Literal["auto", "generate", "encode"] = "auto"
    prompt: str | None = None
    prompt_tokens: int = 128
    batch: int = 1
    max_new_tokens: int = 1
    shapes: tuple[Shape, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)

    def value_problems(self) -> Iterator[str]:
        yield from _outside("batch", self.batch, 4096)
        yield from _outside("prompt_tokens", self.prompt_tokens, 1 << 20)
        yield from _outside("max_new_tokens", self.max_new_tokens, 1 << 16)


@dataclass(frozen=True)
class Hold(Checked):
    """Who keeps the warm model, and for how long (``None``: until released).

    ``make_room``: where memory or a budget is short, what nobody is attached to or uses goes, the longest unused first.
    ``lock``: a process stays that locks the page cache's pages; for a ``target_tier`` of ``cached``.
    """

    owner: str | None = None
    ttl_s: float | None = None
    make_room: bool = False
    lock: bool = False

    def value_problems(self) -> Iterator[str]:
        if self.ttl_s is not None and self.ttl_s <= 0:
            yield f"ttl_s: {self.ttl_s} must be above 0"


@dataclass(frozen=True)
class ReadyRequest(Checked):
    """What is posted to a server to see that it answers; without a ``body``, an OpenAI-style completion.

    That asks for the recipe's own prompt, or its first token ids where it has none, and for few new tokens.
    """

    path: str = "/v1/completions"
    body: Mapping[str, object] | None = None

    def value_problems(self) -> Iterator[str]:
        yield from _not_url_path("path", self.path)
        try:
            json.dumps(self.body, allow_nan=False)
        except (TypeError, ValueError) as error:
            yield f"body: is no JSON: {error}"


@dataclass(frozen=True)
class Serve(Checked):
    """How a warm model is served: a process attaches to it and calls ``entry`` with model, tokenizer and context.

    ``entry``: ``module:function``; ``path``: a folder on the host where Python looks for the module first.
    ``health``: a path that must answer 200 before ``request`` is sent. All of that has ``ready_timeout_s``.
    """

    entry: str
    port: int
    host: str = "127.0.0.1"
    path: str | None = None
    health: str | None = None
    request: ReadyRequest = field(default_factory=ReadyRequest)
    ready_timeout_s: float = 60.0

    @property
    def address(self) -> str:
        return _address(self.host, self.port)

    def value_problems(self) -> Iterator[str]:
        if not _HOST.fullmatch(self.host):
            yield f"host: {self.host[:80]!r} is neither a name nor an address"
        if self.path is not None and (not self.path or "\0" in self.path):
            yield "path: must name a folder on the host"
        if self.health is not None:
            yield from _not_url_path("health", self.health)
        if not 0 < self.ready_timeout_s <= 86400:
            yield f"ready_timeout_s: {self.ready_timeout_s:g} is not within 0..86400 seconds"
        yield from _outside("port", self.port, 65535)
        if not _ENTRY.fullmatch(self.entry):
            yield f"entry: {self.entry[:80]!r} is not module:function"


@dataclass(frozen=True)
class Recipe(Checked):
    """What to warm and how; validated once, then only passed on.

    ``devices``: ``auto`` (the first GPU, or the CPU where there is none),
    ``all``, ``cpu``, ``cuda:N`` or a GPU UUID. ``deadlines``: seconds a stage.
    """

    name: str
    model: ModelSource
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    devices: tuple[str, ...] = ("auto",)
    target_tier: Literal["cached", "host", "resident", "standby"] = "standby"
    weights: WeightsPolicy = field(default_factory=WeightsPolicy)
    compile: CompilePolicy = field(default_factory=CompilePolicy)
    request: FirstRequest = field(default_factory=FirstRequest)
    environment: Mapping[str, str] = field(default_factory=dict)
    deadlines: Mapping[str, float] = field(default_factory=dict)
    hold: Hold = field(default_factory=Hold)
    serve: Serve | None = None
    trust_remote_code: bool = False

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages of a run, in canonical order."""
        return NATIVE_STAGES if self.serve is None else STAGES

    @property
    def needs_device(self) -> bool:
        """Whether a run does anything on a device: ``cached`` is the host's page cache."""
        return self.target_tier != "cached"

    @property
    def builds_model(self) -> bool:
        """Whether a run makes a model of the weights: the tiers before ``resident`` are bytes alone."""
        return self.target_tier in ("resident", "standby")

    @property
    def is_for_others(self) -> bool:
        """Whether its weights are to lie with the keeper, on whatever device: so that other processes attach."""
        return self.target_tier == "resident" or self.serve is not None

    def value_problems(self) -> Iterator[str]:
        if not self.devices:
            yield "devices: name at least one device"
        for device in self.devices:
            if not _DEVICE.fullmatch(device):
                yield f"devices: {device[:80]!r} is not auto, all, cpu, cuda:N or a GPU UUID"
        if len(self.devices) > 1 and {"auto", "all"} & set(self.devices):
            yield "devices: 'auto' and 'all' stand alone"
        if len(set(self.devices)) < len(self.devices):
            yield "devices: a device is named twice"
        if self.target_tier == "host" and "cpu" in self.devices:
            yield "target_tier: host registers files with a GPU, and devices names cpu: cached is what a CPU has"
        if self.hold.lock and self.target_tier != "cached":
            yield f"hold.lock: locks the page cache at target_tier cached, and target_tier is {self.target_tier}"
        if self.serve is not None and not self.builds_model:
            yield f"serve: needs a model, and target_tier is {self.target_tier}: resident and standby make one"
        if self.serve is not None and len(self.devices) > 1:
            yield f"serve: one process serves one device, and devices names {len(self.devices)}"
        for stage, limit in self.deadlines.items():
            if stage not in self.stages:
                yield f"deadlines.{stage}: is not a stage; stages are {', '.join(self.stages)}"
            elif limit <= 0:
                yield f"deadlines.{stage}: {limit} must be above 0 seconds"
        for key in self.environment:
            if not _VARIABLE.fullmatch(key):
                yield f"environment: {key[:80]!r} is not a variable name"
        if not _NAME.fullmatch(self.name):
            yield f"name: {self.name[:80]!r} must be 1..64 letters, digits, '.', '_' or '-'"


# --- what a run is made of ---------------------------------------------------


@dataclass(frozen=True)
class Actor:
    """Who asked for something, and from where."""

    user: str
    host: str


@dataclass(frozen=True)
class Failure:
    """Why something did not work: a stable ``code``, the stage, and one line for a person."""

    code: str
    detail: str
    stage: str | None = None
    log_tail: tuple[str, ...] = ()


@dataclass(frozen=True)
class StageRecord:
    """One stage of one run. ``duration_ns`` is its span; ``attributed_ns`` its share of the wall time.

    ``rate_bytes_s`` and ``ceiling_bytes_s`` stand beside ``bytes`` where bytes move;
    ``path`` is the loader path taken, ``reason`` why it was reused, skipped or fell back.
    ``extra`` holds further figures by name (steps in nanoseconds, counters, short text).
    """

    name: str
    status: StageStatus
    start_ns: int | None = None
    duration_ns: int | None = None
    attributed_ns: int | None = None
    bytes: int | None = None
    rate_bytes_s: float | None = None
    ceiling_bytes_s: float | None = None
    path: str | None = None
    reason: str | None = None
    extra: Mapping[str, Union[int, float, str, bool, None]] = field(default_factory=dict)


@dataclass(frozen=True)
class RunRecord:
    """A run as the host knows it. The parts sum: attributed + unattributed = ``wall_ns``, once it is over."""

    run_uid: str
    recipe: str
    recipe_hash: str
    model: str
    actor: Actor
    state: RunState
    tier_from: Tier
    tier_to: Tier | None
    accepted_wall_ns: int
    devices: tuple[str, ...] = ()
    wall_ns: int | None = None
    unattributed_ns: int | None = None
    first_output_ns: int | None = None
    output: str | None = None
    stages: tuple[StageRecord, ...] = ()
    failure: Failure | None = None


# --- durable events ----------------------------------------------------------


@dataclass(frozen=True)
class DaemonStarted:
    agent_version: str
    boot_id: str
    pid: int


@dataclass(frozen=True)
class RunAccepted:
    """``tier_from`` is that of a process that waits, or ``cold``; the rest preflight finds (`StageRecord.extra`)."""

    recipe: Recipe
    recipe_hash: str
    actor: Actor
    tier_from: Tier
    devices: tuple[str, ...]


@dataclass(frozen=True)
class RunStarted:
    """The run left the queue."""


@dataclass(frozen=True)
class StageChanged:
    stage: StageRecord


@dataclass(frozen=True)
class RunFinished:
    """Terminal. ``run`` carries every stage with its final attribution."""

    run: RunRecord


@dataclass(frozen=True)
class ResidentChanged:
    """A warm model appeared on a device or is another one now (``held``), or is gone, with the reason.

    ``steps``: what parking or unparking it took, in nanoseconds by name.
    """

    resident: Resident
    state: Literal["held", "gone"]
    reason: str | None = None
    steps: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Finding:
    """Something an operator should know that is not a state of a run."""

    code: str
    severity: Literal["info", "warning", "error"]
    text: str


JOURNAL_UNWRITABLE = "journal_unwritable"
"""Code of a refusal, and of a probe's finding: what happens is told only once the host's disk takes it."""


@dataclass(frozen=True)
class UnknownData:
    """Event data that this version can't read; kept, never guessed at.

    ``problem``: what in them does not fit their kind; None where the kind itself is not known.
    """

    raw: object
    problem: str | None = None


EventData = Union[
    DaemonStarted, RunAccepted, RunStarted, StageChanged, RunFinished, ResidentChanged, Finding, UnknownData
]

EVENT_KINDS: dict[str, type] = {
    "daemon.started": DaemonStarted,
    "run.accepted": RunAccepted,
    "run.started": RunStarted,
    "run.stage": StageChanged,
    "run.finished": RunFinished,
    "resident": ResidentChanged,
    "finding": Finding,
}


@dataclass(frozen=True)
class Event:
    """A durable change of state; ``(journal_uuid, seq)`` names it for ever. ``data`` fits ``kind``."""

    seq: int
    run_uid: str | None
    t_mono_ns: int
    t_wall_ns: int
    kind: str
    data: object


@dataclass(frozen=True)
class Gap:
    """Events ``from_seq..to_seq`` were trimmed before this subscriber had them."""

    from_seq: int
    to_seq: int


# --- droppable samples ---------------------------------------------------------


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


# --- what a node is -------------------------------------------------------------


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
        return _address(self.host, self.port)


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


# --- methods: params and results --------------------------------------------------


@dataclass(frozen=True)
class HelloParams:
    client: str
    protocol_min: int = PROTOCOL_MIN
    protocol_max: int = PROTOCOL_MAX


@dataclass(frozen=True)
class HelloResult:
    protocol: int
    agent_version: str
    journal_uuid: str
    boot_id: str
    oldest_seq: int
    newest_seq: int
    hostname: str
    user: str
    pid: int
    python: str
    heartbeat_s: float
    t_mono_ns: int
    t_wall_ns: int


@dataclass(frozen=True)
class SubscribeParams:
    """``after_seq`` is the highest contiguous seq the subscriber has stored of ``journal_uuid``; 0 for none.

    ``samples`` asks for droppable samples too. An empty ``subscriber`` follows
    without a cursor: it can't acknowledge, and nothing is kept for it.
    """

    subscriber: str
    after_seq: int = 0
    samples: bool = True


@dataclass(frozen=True)
class SubscribeResult:
    next_seq: int


@dataclass(frozen=True)
class AckParams:
    subscriber: str
    seq: int


@dataclass(frozen=True)
class Empty:
    """No parameters, or nothing to say but that it was done."""


@dataclass(frozen=True)
class RunStartParams(Checked):
    """Idempotent: the same ``run_uid`` again answers with the run that is there.

    ``python``: argv of the host's own GPU Python; empty for the one the agent runs on. ``hold_budget``: how much of
    a device warm models may take together with this run's, as ``80%`` or ``60 GB``; empty for no limit of the run's.
    """

    run_uid: str
    recipe: Recipe
    actor: Actor
    python: tuple[str, ...] = ()
    hold_budget: str = ""

    def value_problems(self) -> Iterator[str]:
        if self.hold_budget:
            try:
                parse_budget(self.hold_budget)
            except ValueError as error:
                yield f"hold_budget: {error}"
        if not re.fullmatch(r"[0-9a-zA-Z-]{8,64}", self.run_uid):
            yield "run_uid: must be 8..64 letters, digits or '-'"


@dataclass(frozen=True)
class RunStartResult:
    run: RunRecord
    created: bool


@dataclass(frozen=True)
class RunUidParams:
    run_uid: str


@dataclass(frozen=True)
class RunResult:
    run: RunRecord


@dataclass(frozen=True)
class RunListParams(Checked):
    limit: int = 50

    def value_problems(self) -> Iterator[str]:
        yield from _outside("limit", self.limit, 1000)


@dataclass(frozen=True)
class RunListResult:
    runs: tuple[RunRecord, ...]


@dataclass(frozen=True)
class StatusResult:
    """What is on the node now: unfinished runs, warm models, and the daemon's own processes."""

    runs: tuple[RunRecord, ...]
    residents: tuple[Resident, ...]
    processes: Mapping[str, Union[int, None]]
    probe: Probe | None = None


@dataclass(frozen=True)
class ResidentListResult:
    residents: tuple[Resident, ...]


@dataclass(frozen=True)
class ReleaseParams:
    """What to let go: what one run left warm, everything, and the keeper's hold on the driver.

    What is attached is refused, after ``wait_s`` in which that may end; ``force`` lets it go all the same.
    """

    run_uid: str | None = None
    everything: bool = False
    driver: bool = False
    force: bool = False
    wait_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.wait_s <= 3600:
            raise ValueError(f"wait_s: {self.wait_s} is not within 0..3600")


@dataclass(frozen=True)
class ReleaseResult:
    released: tuple[Resident, ...]
    driver_released: bool


@dataclass(frozen=True)
class CacheEntry:
    """One complete warm-up in a compile cache. ``key``: what it depends on, in named parts, each cut to 80 characters.

    ``size_bytes``: of what is there of it, shared with other keys or not; ``missing``: files that are gone.
    """

    digest: str
    model: str
    created_unix_s: int
    used_unix_s: int
    size_bytes: int
    missing: int = 0
    key: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class CacheListParams(Checked):
    """``directory``: on the host; None for the agent's own."""

    directory: str | None = None

    def value_problems(self) -> Iterator[str]:
        yield from _not_whole("directory", self.directory)


@dataclass(frozen=True)
class CacheListResult:
    """``size_bytes``: of all that the cache has there, recorded under a key or not."""

    directory: str
    entries: tuple[CacheEntry, ...]
    size_bytes: int


@dataclass(frozen=True)
class CacheClearParams(Checked):
    """What to clear: one key, by how its digest begins, everything, or what was not used for so long."""

    digest: str | None = None
    everything: bool = False
    older_than_s: float | None = None
    directory: str | None = None

    def value_problems(self) -> Iterator[str]:
        yield from _not_whole("directory", self.directory)
        if [self.digest is not None, self.everything, self.older_than_s is not None].count(True) != 1:
            yield "digest: name one of digest, everything and older_than_s"
        if self.digest is not None and not re.fullmatch(r"[0-9a-f]{4,32}", self.digest):
            yield f"digest: {self.digest[:40]!r} must be 4..32 hexadecimal digits"
        if self.older_than_s is not None and not 0 <= self.older_than_s <= 1e10:
            yield f"older_than_s: {self.older_than_s} is not within 0..1e10"


@dataclass(frozen=True)
class CacheClearResult:
    directory: str
    cleared: tuple[CacheEntry, ...]
    freed_bytes: int


@dataclass(frozen=True)
class StandbyStopParams:
    """Which standbys to end, by their recipe's name: armed ones, and those that hold weights.

    What the keeper has of those weights stays resident.
    """

    recipe: str


@dataclass(frozen=True)
class StandbyStopResult:
    stopped: tuple[Resident, ...]


@dataclass(frozen=True)
class ServeStopParams:
    """Which servers to stop: that of a recipe, by its name, or all of them. Their model stays warm."""

    recipe: str | None = None


@dataclass(frozen=True)
class ServeStopResult:
    stopped: tuple[Server, ...]


@dataclass(frozen=True)
class VerifyParams(Checked):
    """Ask what is ready of a model ``count`` times, with ``interval_s`` between the starts of two requests.

    ``model``: a recipe's name, the model's path, or what the keeper calls it. A recipe that serves is asked through its
    port alone. ``recipe`` and ``python``: what to make of a resident that only the keeper knows of. Each request has
    ``timeout_s``.
    """

    model: str
    count: int = 1
    interval_s: float = 0.0
    timeout_s: float = 30.0
    recipe: Recipe | None = None
    python: tuple[str, ...] = ()

    def value_problems(self) -> Iterator[str]:
        yield from _outside("count", self.count, 200)
        if not 0 <= self.interval_s <= 600:
            yield f"interval_s: {self.interval_s:g} is not within 0..600"
        if not 0 < self.timeout_s <= 600:
            yield f"timeout_s: {self.timeout_s:g} is not within 0..600"
        if not self.model:
            yield "model: must name what is to be asked"


@dataclass(frozen=True)
class VerifySample:
    """One request: its times from when it was sent, or why there are none.

    ``first_output_ns``: the first byte of a streamed answer, else all of it; in a process, the first token.
    """

    t_wall_ns: int
    first_output_ns: int | None = None
    total_ns: int | None = None
    output: str | None = None
    error: str | None = None


@dataclass(frozen=True)
class VerifyResult:
    """``way``: how it was asked, through a port, in the standby itself, or in a process attached for that."""

    samples: tuple[VerifySample, ...]
    tier: Tier
    run_uid: str | None
    way: Literal["port", "standby", "attached"]


@dataclass(frozen=True)
class ParkParams(Checked):
    """Which standbys to take off their devices, or to put back: those of one run, or one by its keeper's name.

    Idempotent: what is there already stays there. Refused for anything but an idle standby on a GPU.
    """

    run_uid: str | None = None
    name: str | None = None

    def value_problems(self) -> Iterator[str]:
        if (self.run_uid is None) == (self.name is None):
            yield "run_uid: give either this or name"


@dataclass(frozen=True)
class ParkResult:
    """The standbys that were named, as they are now. ``steps``: by device, nanoseconds by name of what was moved."""

    residents: tuple[Resident, ...]
    steps: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class ShutdownParams:
    """``keeper``: end the keeper too. Refused while something is held or runs, unless ``force``.

    What the keeper alone holds outlives the agent, and counts only where ``keeper`` is to end.
    """

    keeper: bool = False
    force: bool = False


@dataclass(frozen=True)
class Installed:
    """What an installation of the agent on a host came to.

    ``digest``: of the version that is current now; ``before``: of the one that was. ``pid``: of the agent now.
    ``was_running``: another version's agent was at work and has ended. ``removed``: digests of old versions.
    """

    version: str
    digest: str
    path: str
    before: str | None
    pid: int | None
    was_running: bool
    removed: tuple[str, ...]


@dataclass(frozen=True)
class InstallTold:
    """One line of an installation that a console follows; the last one has ``done`` or ``error``.

    ``step``: what goes on, for people; ``ready`` is the host's Python before anything of the agent's file runs.
    ``code``: a refusal's stable word.
    """

    step: str | None = None
    error: str | None = None
    code: str = ""
    done: Installed | None = None


@dataclass(frozen=True)
class Method:
    params: type
    result: type


METHODS: dict[str, Method] = {
    "hello": Method(HelloParams, HelloResult),
    "subscribe": Method(SubscribeParams, SubscribeResult),
    "ack": Method(AckParams, Empty),
    "probe": Method(Empty, Probe),
    "status": Method(Empty, StatusResult),
    "run.start": Method(RunStartParams, RunStartResult),
    "run.cancel": Method(RunUidParams, RunResult),
    "run.list": Method(RunListParams, RunListResult),
    "run.get": Method(RunUidParams, RunResult),
    "resident.list": Method(Empty, ResidentListResult),
    "resident.release": Method(ReleaseParams, ReleaseResult),
    "cache.list": Method(CacheListParams, CacheListResult),
    "cache.clear": Method(CacheClearParams, CacheClearResult),
    "standby.start": Method(RunStartParams, RunStartResult),
    "standby.stop": Method(StandbyStopParams, StandbyStopResult),
    "serve.stop": Method(ServeStopParams, ServeStopResult),
    "verify": Method(VerifyParams, VerifyResult),
    "park": Method(ParkParams, ParkResult),
    "unpark": Method(ParkParams, ParkResult),
    "shutdown": Method(ShutdownParams, Empty),
}

NOTIFICATIONS: dict[str, type] = {"event": Event, "sample": Sample, "gap": Gap, "heartbeat": Heartbeat}
