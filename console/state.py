"""What the console knows of each node, and the pure function that brings it up to date.

`console.reduce.reduce(state, change) -> state` does no I/O, reads no clock and never
mutates. Times named ``*_s`` are the console's own monotonic clock.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from remote_agent.protocol.messages import (
    Actor,
    Event,
    Failure,
    Finding,
    Gap,
    HelloResult,
    HostSample,
    Probe,
    Progress,
    Resident,
    ResidentChanged,
    RunRecord,
    RunState,
    Sample,
    StageRecord,
    StatusResult,
    Tier,
)

LOG_LINES = 200
RUNS_KEPT = 20
RESIDENTS_KEPT = 256
GONE_KEPT = 64
BASELINES_KEPT = 256


class LinkStatus(str, enum.Enum):
    """None of these says anything about a run."""

    IDLE = "idle"
    CONNECTING = "connecting"
    CONNECTED = "connected"
    SILENT = "silent"
    DISCONNECTED = "disconnected"


@dataclass(frozen=True)
class LinkState:
    """``reason`` is one cleaned line; ``since_s`` when this status began; ``final``: no retry will be made.

    ``failures``: how many tries in a row found no agent; a conversation that was lost is none of them.
    """

    status: LinkStatus = LinkStatus.IDLE
    since_s: float = 0.0
    reason: str | None = None
    retry_at_s: float | None = None
    final: bool = False
    failures: int = 0


@dataclass(frozen=True)
class StageBaseline:
    """Medians of earlier ready runs, nanoseconds; ``recent_wall_ns`` oldest first."""

    count: int
    wall_ns: int
    stages_ns: Mapping[str, int]
    recent_wall_ns: tuple[int, ...] = ()


BaselineKey = tuple[str, Tier, bool]
"""Recipe hash, the tier a run started from, and whether it armed a process: what runs are compared by."""


@dataclass(frozen=True)
class RunView:
    """A run as a panel shows it. ``accepted_mono_ns`` is the host's clock; see `NodeState.clock_offset_ns`.

    ``is_accepted`` is False while the run waits in this console, for a free place
    among the parallel loads or for its node's answer; the node need not know it yet.
    """

    run_uid: str
    recipe: str
    recipe_hash: str
    model: str
    actor: Actor
    state: RunState
    tier_from: Tier
    accepted_mono_ns: int | None
    accepted_wall_ns: int
    devices: tuple[str, ...] = ()
    tier_to: Tier | None = None
    stages: tuple[StageRecord, ...] = ()
    progress: Progress | None = None
    wall_ns: int | None = None
    unattributed_ns: int | None = None
    first_output_ns: int | None = None
    output: str | None = None
    failure: Failure | None = None
    baseline: StageBaseline | None = None
    is_accepted: bool = True

    @property
    def is_armed(self) -> bool:
        """Whether all it made was a process that waits for weights; known once it is over."""
        return self.tier_to is Tier.ARMED

    @property
    def baseline_key(self) -> BaselineKey:
        return self.recipe_hash, self.tier_from, self.is_armed

    @property
    def current_stage(self) -> StageRecord | None:
        """The stage that runs now, the latest in order where several do."""
        running = [stage for stage in self.stages if stage.status.value == "running"]
        return running[-1] if running else None


@dataclass(frozen=True)
class LogLine:
    """One line of a node's event log, already cleaned."""

    t_wall_ns: int
    run_uid: str | None
    severity: str
    text: str


@dataclass(frozen=True)
class NodeState:
    """Everything a panel draws. Remote text in here has passed `clean`.

    ``clock_offset_ns``: console monotonic minus host monotonic, the smallest seen.
    ``latest_run`` is the run a panel shows. ``residents`` is None until the node was asked; ``gone`` are those that
    left, with why, the newest last.
    ``seq`` is the newest event of ``journal_uuid`` in here. ``baselines`` are history's
    medians.
    """

    name: str
    tags: tuple[str, ...] = ()
    recipes: tuple[str, ...] = ()
    link: LinkState = field(default_factory=LinkState)
    hello: HelloResult | None = None
    probe: Probe | None = None
    host: HostSample | None = None
    residents: tuple[Resident, ...] | None = None
    gone: tuple[ResidentChanged, ...] = ()
    runs: Mapping[str, RunView] = field(default_factory=dict)
    latest_run: str | None = None
    clock_offset_ns: int | None = None
    log: tuple[LogLine, ...] = ()
    journal_uuid: str | None = None
    seq: int = 0
    baselines: Mapping[BaselineKey, StageBaseline] = field(default_factory=dict)

    @property
    def run(self) -> RunView | None:
        return self.runs.get(self.latest_run) if self.latest_run else None

    @property
    def is_known(self) -> bool:
        """Whether the node can be asked now; otherwise its unfinished runs show as ``unknown``."""
        return self.link.status is LinkStatus.CONNECTED


def is_warm(state: NodeState) -> bool:
    """Whether any model is warm on a node; a process that waits for weights is none."""
    return any(resident.tier is not Tier.ARMED for resident in state.residents or ())


def unfinished_runs(state: NodeState) -> tuple[RunView, ...]:
    return tuple(run for run in state.runs.values() if not run.state.is_terminal)


def elapsed_ns(run: RunView, state: NodeState, console_mono_ns: int) -> int | None:
    """Return how long ``run`` has taken, its wall time once it is over; None where that can't be told."""
    if run.wall_ns is not None:
        return run.wall_ns
    if run.state.is_terminal or run.accepted_mono_ns is None or state.clock_offset_ns is None:
        return None
    return max(0, console_mono_ns - state.clock_offset_ns - run.accepted_mono_ns)


def eta_ns(run: RunView, state: NodeState, console_mono_ns: int) -> int | None:
    """Return how long ``run`` will still take if its rate holds and the rest goes as in history.

    A stage counts with its median, less what it has used; where bytes and a rate are
    known, with the bytes that are left. None without a baseline, or once it is over.
    """
    elapsed = elapsed_ns(run, state, console_mono_ns)
    if run.state.is_terminal or run.baseline is None or elapsed is None:
        return None
    stages = {stage.name: stage for stage in run.stages}
    return sum(_left_ns(run, stages.get(name), median, elapsed) for name, median in run.baseline.stages_ns.items())


def _left_ns(run: RunView, stage: StageRecord | None, median_ns: int, elapsed_ns: int) -> int:
    if stage is None or stage.status.value == "pending":
        return median_ns
    if stage.status.is_over:
        return 0
    progress = run.progress
    if progress is not None and progress.stage == stage.name and progress.rate_bytes_s and progress.total is not None:
        return int(max(0, progress.total - progress.done) / progress.rate_bytes_s * 1e9)
    return max(0, median_ns - max(0, elapsed_ns - (stage.start_ns or 0)))


# --- what can happen to a node -----------------------------------------------


@dataclass(frozen=True)
class LinkChanged:
    link: LinkState


@dataclass(frozen=True)
class HelloReceived:
    hello: HelloResult
    console_mono_ns: int


@dataclass(frozen=True)
class StatusReceived:
    status: StatusResult


@dataclass(frozen=True)
class RunReceived:
    """One run as the node tells it now, or as the history has it, with what it is compared by."""

    run: RunRecord
    baseline: StageBaseline | None = None


@dataclass(frozen=True)
class RunQueued:
    """This console means to start ``run`` and has not been answered yet."""

    run: RunView


@dataclass(frozen=True)
class RunDropped:
    """A run that the node never accepted will not be: withdrawn here, or refused there."""

    run_uid: str
    t_wall_ns: int
    failure: Failure | None = None


@dataclass(frozen=True)
class ProbeReceived:
    probe: Probe


@dataclass(frozen=True)
class EventReceived:
    event: Event
    console_mono_ns: int


@dataclass(frozen=True)
class SampleReceived:
    sample: Sample
    console_mono_ns: int


@dataclass(frozen=True)
class GapReceived:
    gap: Gap


@dataclass(frozen=True)
class BaselineLoaded:
    """History's medians for the runs of one key."""

    key: BaselineKey
    baseline: StageBaseline


@dataclass(frozen=True)
class LocalFinding:
    """Something the console itself has to say about a node."""

    t_wall_ns: int
    finding: Finding


Change = (
    LinkChanged
    | HelloReceived
    | StatusReceived
    | RunReceived
    | RunQueued
    | RunDropped
    | ProbeReceived
    | EventReceived
    | SampleReceived
    | GapReceived
    | BaselineLoaded
    | LocalFinding
)
