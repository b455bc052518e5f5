"""What can happen to a rollout, and what it then wants done. An intent is stored before it is acted on."""

from __future__ import annotations

from dataclasses import dataclass

from console.rollout.states import NodeState, Verdict

# --- events ------------------------------------------------------------------


@dataclass(frozen=True)
class Begin:
    """The rollout is to start; any event would do, this one says nothing else."""


@dataclass(frozen=True)
class Tick:
    """It is ``now_s``; an earlier time than the last one changes nothing."""

    now_s: float


@dataclass(frozen=True)
class NodeReached:
    """A node's attempt came to a state: on its own, or as the answer to `ReadNode`.

    ``unreachable``: it can't be asked, so it counts as serving nobody.
    """

    node: str
    attempt: int
    state: NodeState
    reason: str = ""
    unreachable: bool = False


@dataclass(frozen=True)
class HookEnded:
    """``shift`` or ``after_shift`` of an attempt ended."""

    node: str
    attempt: int
    hook: str
    succeeded: bool
    reason: str = ""


@dataclass(frozen=True)
class BackedOut:
    """A `BackOutNode` ended: the node is in its former traffic again, or is not."""

    node: str
    succeeded: bool
    reason: str = ""


@dataclass(frozen=True)
class StopEnded:
    """A `StopNode` ended: nothing of the attempt runs on the node any more, or it may, for that reason."""

    node: str
    attempt: int
    succeeded: bool
    reason: str = ""


@dataclass(frozen=True)
class AvailabilityChanged:
    """A node outside the rollout's own work stopped serving, or serves again."""

    node: str
    is_down: bool


@dataclass(frozen=True)
class GateSampled:
    """One sample of one gate of that analysis, over all of its nodes."""

    analysis: int
    gate: int
    verdict: Verdict
    reason: str = ""


@dataclass(frozen=True)
class Restarted:
    """Whoever carried out intents is gone, and its clock with it; it is ``now_s`` on the new one."""

    now_s: float = 0.0


@dataclass(frozen=True)
class Pause:
    """The operator's; running attempts go on, nothing is begun."""

    reason: str = ""


@dataclass(frozen=True)
class Resume:
    """The operator's: go on; an inconclusive gate is looked at anew. It leads past no failed one."""


@dataclass(frozen=True)
class Promote:
    """The operator's: go on, past a pause or an inconclusive gate, and without what failed at one.

    ``everything``: past all later pauses too.
    """

    everything: bool = False


@dataclass(frozen=True)
class Retry:
    """The operator's: try a failed node once more, from the beginning."""

    node: str


@dataclass(frozen=True)
class Skip:
    """The operator's: leave a node out; without a reason nothing happens."""

    node: str
    reason: str


@dataclass(frozen=True)
class Abort:
    """The operator's; each one asks again for what could not be backed out, or ended."""

    reason: str = ""


Event = (
    Begin | Tick | NodeReached | HookEnded | BackedOut | StopEnded | AvailabilityChanged | GateSampled | Restarted
    | Pause | Resume | Promote | Retry | Skip | Abort
)  # fmt: skip

# --- intents -----------------------------------------------------------------


@dataclass(frozen=True)
class StartNode:
    """Carry out an attempt's first steps, in order: hook ``before_shift`` where there is one, then ``warm``."""

    node: str
    attempt: int
    steps: tuple[str, ...]


@dataclass(frozen=True)
class StopNode:
    """Nothing more is wanted of an attempt: end what runs of it. Is asked again where the node does not answer."""

    node: str
    attempt: int


@dataclass(frozen=True)
class RunHook:
    """Run ``shift`` or ``after_shift`` for a node that was verified."""

    node: str
    attempt: int
    hook: str


@dataclass(frozen=True)
class TakeSample:
    """Take one sample of a gate, over these nodes."""

    analysis: int
    gate: int
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class BackOutNode:
    """Bring a node that was taken out of traffic back to where it was: hook ``on_abort``. May be asked again."""

    node: str
    attempt: int


@dataclass(frozen=True)
class ReadNode:
    """Ask what an attempt has come to."""

    node: str
    attempt: int


@dataclass(frozen=True)
class Paused:
    """Say that it waits for the operator, and why."""

    reason: str


@dataclass(frozen=True)
class Finish:
    """It is over; ``aborted`` or not, and why."""

    aborted: bool
    reason: str = ""


Intent = StartNode | StopNode | RunHook | TakeSample | BackOutNode | ReadNode | Paused | Finish
