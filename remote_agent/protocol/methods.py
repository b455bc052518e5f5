"""What can be asked of an agent: parameters and results."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Literal, Union

from remote_agent.protocol.budget import parse_budget
from remote_agent.protocol.checks import not_whole, outside
from remote_agent.protocol.codec import Checked
from remote_agent.protocol.events import Event, Gap
from remote_agent.protocol.hosts import Probe, Resident, Server
from remote_agent.protocol.recipes import Recipe
from remote_agent.protocol.records import dataclass
from remote_agent.protocol.runs import Actor, RunRecord
from remote_agent.protocol.samples import Heartbeat, Sample
from remote_agent.protocol.states import Tier
from remote_agent.protocol.version import PROTOCOL_MAX, PROTOCOL_MIN


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
        yield from outside("limit", self.limit, 1000)


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


RELEASE_WAIT_MOST_S = 3600.0


@dataclass(frozen=True)
class ReleaseParams(Checked):
    """What to let go: what one run left warm, everything, and the keeper's hold on the driver.

    What is attached is refused, after ``wait_s`` in which that may end; ``force`` lets it go all the same.
    """

    run_uid: str | None = None
    everything: bool = False
    driver: bool = False
    force: bool = False
    wait_s: float = 0.0

    def value_problems(self) -> Iterator[str]:
        if not 0 <= self.wait_s <= RELEASE_WAIT_MOST_S:
            yield f"wait_s: {self.wait_s:g} is not within 0..{RELEASE_WAIT_MOST_S:g}"


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
        yield from not_whole("directory", self.directory)


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
        yield from not_whole("directory", self.directory)
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


VERIFY_COUNT_MOST, VERIFY_MOST_S = 200, 600.0
"""Samples of one `verify`, and what may be between two of them or for one."""


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
        yield from outside("count", self.count, VERIFY_COUNT_MOST)
        if not 0 <= self.interval_s <= VERIFY_MOST_S:
            yield f"interval_s: {self.interval_s:g} is not within 0..{VERIFY_MOST_S:g}"
        if not 0 < self.timeout_s <= VERIFY_MOST_S:
            yield f"timeout_s: {self.timeout_s:g} is not above 0 and at most {VERIFY_MOST_S:g}"
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
