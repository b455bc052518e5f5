"""What a rollout is at one moment: frozen, made of what the codec can write and read back.

Times named ``*_s`` are on the clock of `events.Tick`, which only the caller knows.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

CALLED_OFF, NOT_BEGUN = "called off", "not begun"


class NodeState(str, enum.Enum):
    """Where a node stands in its rollout. ``unknown``: it was under way, and nobody can say how far it is."""

    PENDING = "pending"
    DRAINING = "draining"
    WARMING = "warming"
    VERIFYING = "verifying"
    SHIFTING = "shifting"
    READY = "ready"
    FAILED = "failed"
    SKIPPED = "skipped"
    UNKNOWN = "unknown"

    @property
    def is_under_way(self) -> bool:
        return self in (NodeState.DRAINING, NodeState.WARMING, NodeState.VERIFYING, NodeState.SHIFTING)

    @property
    def is_over(self) -> bool:
        return self in (NodeState.READY, NodeState.FAILED, NodeState.SKIPPED)


class Phase(str, enum.Enum):
    """``aborting``: nothing new is started, what was taken out of traffic is brought back."""

    RUNNING = "running"
    PAUSED = "paused"
    ABORTING = "aborting"
    ABORTED = "aborted"
    DONE = "done"

    @property
    def is_over(self) -> bool:
        return self in (Phase.ABORTED, Phase.DONE)


class Verdict(str, enum.Enum):
    """What a sample, or a whole gate, says. Inconclusive is neither: too little was measured."""

    PASS = "pass"
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"


class BackOut(str, enum.Enum):
    """How far bringing a node back into its former traffic is."""

    NONE = "none"
    ASKED = "asked"
    FAILED = "failed"


@dataclass(frozen=True)
class GateRule:
    """How many samples decide a gate; what is measured is the caller's. ``batches`` from 1, empty for all."""

    count: int = 1
    interval_s: float = 5.0
    failure_limit: int = 0
    consecutive_success: int | None = None
    batches: tuple[int, ...] = ()

    def applies_to(self, batch: int) -> bool:
        """Whether it is a condition of that batch, counted from 0."""
        return not self.batches or batch + 1 in self.batches


@dataclass(frozen=True)
class Rules:
    """What does not change during a rollout; every size is a number of nodes already.

    ``hooks``: the names of those that there are. ``pause_after``: batches from 1.
    """

    max_unavailable: int = 1
    max_failures: int = 1
    progress_deadline_s: float = 1800.0
    node_timeout_s: float = 900.0
    retries: int = 0
    backoff_s: float = 10.0
    pause_after: tuple[int, ...] = ()
    gates: tuple[GateRule, ...] = ()
    hooks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ending:
    """An attempt that was to be ended, and of which the node has not said that it is.

    ``asks``: how often it was asked. ``is_asked``: an answer is awaited; else it is asked again at ``due_s``.
    ``reason``: why the last one came to nothing, empty before.
    """

    attempt: int
    asks: int = 1
    is_asked: bool = True
    due_s: float = 0.0
    reason: str = ""


@dataclass(frozen=True)
class NodeRow:
    """One node. ``attempt`` counts from 1 and never returns; ``tries`` since an operator last asked for one.

    ``is_out``: a hook that moves its traffic was begun, and it is neither ready nor back. ``is_down``: it serves
    nobody, for reasons of its own. ``is_verified``: the gates of its batch passed in this attempt; ``is_shifted``:
    its shift was begun in it. ``hook``: the one that runs. ``has_failed`` and ``skip_reason`` stay, whatever comes.
    ``failed_at_gate``: it failed there, and nobody has said yet what is to become of it. ``endings``: attempts whose
    runs may go on there.
    """

    name: str
    batch: int
    state: NodeState = NodeState.PENDING
    reason: str = ""
    skip_reason: str = ""
    attempt: int = 0
    tries: int = 0
    since_s: float = 0.0
    due_s: float = 0.0
    hook: str | None = None
    is_out: bool = False
    is_down: bool = False
    is_verified: bool = False
    is_shifted: bool = False
    has_failed: bool = False
    failed_at_gate: bool = False
    back_out: BackOut = BackOut.NONE
    endings: tuple[Ending, ...] = ()

    @property
    def is_being_ended(self) -> bool:
        """Whether its answer to the end of an attempt is awaited."""
        return any(one.is_asked for one in self.endings)

    @property
    def is_unavailable(self) -> bool:
        """Whether it counts towards ``max_unavailable``."""
        return self.is_out or self.is_down or self.state.is_under_way or self.state is NodeState.UNKNOWN


@dataclass(frozen=True)
class GateCount:
    """Samples of one gate of one analysis. ``is_asked``: one is being taken; else the next is due at ``due_s``."""

    gate: int
    passed: int = 0
    failed: int = 0
    inconclusive: int = 0
    streak: int = 0
    is_asked: bool = False
    due_s: float = 0.0
    verdict: Verdict | None = None
    reason: str = ""

    @property
    def taken(self) -> int:
        return self.passed + self.failed + self.inconclusive


@dataclass(frozen=True)
class Analysis:
    """One look at nodes that are warm and not shifted yet; its number is never used again."""

    number: int
    nodes: tuple[str, ...]
    gates: tuple[GateCount, ...]

    @property
    def verdict(self) -> Verdict | None:
        """Fail if one gate fails, else None while one is open, else inconclusive if one is, else pass."""
        verdicts = [gate.verdict for gate in self.gates]
        for worst in (Verdict.FAIL, None, Verdict.INCONCLUSIVE):
            if worst in verdicts:
                return worst
        return Verdict.PASS


@dataclass(frozen=True)
class RolloutState:
    """A whole rollout. ``batch`` is the one at work, from 0; ``analyses`` how many there were."""

    rules: Rules
    nodes: tuple[NodeRow, ...]
    phase: Phase = Phase.RUNNING
    reason: str = ""
    batch: int = 0
    analysis: Analysis | None = None
    analyses: int = 0
    promoted_all: bool = False
    now_s: float = 0.0
    progress_s: float = 0.0
    passed_pauses: tuple[int, ...] = field(default=())

    def node(self, name: str) -> NodeRow | None:
        return next((row for row in self.nodes if row.name == name), None)

    def word(self, row: NodeRow) -> str:
        """Return what is said of a node: its state, or once nothing more is begun what became of a pending one."""
        if row.state is NodeState.PENDING and self.phase in (Phase.ABORTING, Phase.ABORTED):
            return CALLED_OFF if row.attempt else NOT_BEGUN
        return row.state.value

    @property
    def failures(self) -> int:
        """How many nodes failed, each once, over the whole rollout."""
        return sum(row.has_failed for row in self.nodes)

    @property
    def unavailable(self) -> int:
        return sum(row.is_unavailable for row in self.nodes)


def begin(rules: Rules, batches: Sequence[Sequence[str]], down: Sequence[str] = (), now_s: float = 0.0) -> RolloutState:
    """Return a rollout of which nothing has been done yet; ``down`` names nodes that serve nobody now."""
    rows = [
        NodeRow(name, batch, is_down=name in down, since_s=now_s)
        for batch, names in enumerate(batches)
        for name in names
    ]
    return RolloutState(rules, tuple(rows), now_s=now_s, progress_s=now_s)
