"""What a node's state comes to for a person: its one status, its words, its figures. Pure."""

from __future__ import annotations

import enum

from console.format import age_text
from console.state import LinkStatus, NodeState, RunView, StageBaseline, is_warm
from console.widgets.paint import Moment, Piece
from remote_agent.protocol.messages import Failure, Resident, RunState, Tier

FAILED_STATES = (RunState.FAILED, RunState.INTERRUPTED, RunState.STUCK)


class Status(enum.Enum):
    """One word for a node: its glyph, its word, its role. A lost link is never a failed run."""

    READY = ("✔", "ready", "ready")
    WARMING = ("●", "warming", "running")
    COLD = ("○", "cold", "waiting")
    FAILED = ("✖", "failed", "failed")
    SILENT = ("?", "silent", "unknown")
    DISCONNECTED = ("?", "disconnected", "unknown")
    CONNECTING = ("◌", "connecting", "unknown")

    @property
    def glyph(self) -> str:
        return self.value[0]

    @property
    def word(self) -> str:
        return self.value[1]

    @property
    def role(self) -> str:
        return self.value[2]

    @property
    def piece(self) -> Piece:
        return f"{self.glyph} {self.word}", self.role


_LINK_STATUS = {
    LinkStatus.IDLE: Status.CONNECTING,
    LinkStatus.CONNECTING: Status.CONNECTING,
    LinkStatus.SILENT: Status.SILENT,
    LinkStatus.DISCONNECTED: Status.DISCONNECTED,
}

URGENCY = (
    Status.FAILED,
    Status.SILENT,
    Status.DISCONNECTED,
    Status.WARMING,
    Status.CONNECTING,
    Status.COLD,
    Status.READY,
)
"""What needs an operator first."""


def node_status(state: NodeState) -> Status:
    """Return the node's status: what its link allows to say, then its newest run, then what is warm on it."""
    if not state.is_known:
        return _LINK_STATUS[state.link.status]
    run = state.run
    if run is not None and not run.state.is_terminal:
        return Status.WARMING
    if run is not None and run.state in FAILED_STATES:
        return Status.FAILED
    return Status.READY if is_warm(state) else Status.COLD


RUN_WORDS: dict[str, Piece] = {
    RunState.QUEUED.value: ("○ waiting", "waiting"),
    RunState.RUNNING.value: ("● running", "running"),
    RunState.READY.value: ("✔ ready", "ready"),
    RunState.FAILED.value: ("✖ failed", "failed"),
    RunState.CANCELLED.value: ("○ cancelled", "waiting"),
    RunState.INTERRUPTED.value: ("✖ interrupted", "failed"),
    RunState.STUCK.value: ("✖ stuck", "failed"),
}
UNKNOWN_RUN: Piece = ("? unknown", "unknown")


def run_word(run_state: str, *, is_known: bool) -> Piece:
    """Return glyph and word of a run; unfinished ones are ``unknown`` while their node can't be asked."""
    if not is_known and run_state in (RunState.QUEUED.value, RunState.RUNNING.value):
        return UNKNOWN_RUN
    return RUN_WORDS.get(run_state, UNKNOWN_RUN)


def earlier_runs(run: RunView) -> StageBaseline | None:
    """Return history's medians unless they are of this very run alone, which says nothing."""
    baseline = run.baseline
    if baseline is not None and baseline.count == 1 and baseline.wall_ns == run.wall_ns:
        return None
    return baseline


def link_words(state: NodeState, moment: Moment) -> str:
    """Return the link's status with its age: ``disconnected 34 s``."""
    link = state.link
    words = {LinkStatus.CONNECTED: "linked", LinkStatus.IDLE: "not connected yet"}
    word = words.get(link.status, link.status.value)
    if link.status is LinkStatus.IDLE:
        return word
    return f"{word} {age_text(moment.mono_s - link.since_s)}"


def retry_words(state: NodeState, moment: Moment) -> str:
    """Say what happens next with a link that is down."""
    link, key = state.link, moment.key("fleet.retry")
    if link.final:
        return f"no retry until {key} is pressed"
    if link.retry_at_s is None:
        return f"{key} retries now"
    wait_s = link.retry_at_s - moment.mono_s
    if wait_s <= 0:
        return "retrying now"
    return f"retry in {age_text(wait_s)}, {key} retries now"


def tiers_of(state: NodeState) -> tuple[tuple[str, str, str], ...]:
    """Return ``(recipe, tier, role)`` of each warm model and of each recipe of the node that isn't warm."""
    if state.residents is None:
        return tuple((recipe, "? unknown", "unknown") for recipe in state.recipes)
    by_recipe: dict[str, Resident] = {}
    for resident in state.residents:
        by_recipe.setdefault(resident.recipe, resident)
    warm = [(name, one.tier.value, "text" if one.tier is Tier.ARMED else "ready") for name, one in by_recipe.items()]
    left = _left_cached(state)
    if left is not None and left not in by_recipe and left not in state.recipes:
        warm.append((left, Tier.CACHED.value, "muted"))
    rest = [
        (recipe, Tier.CACHED.value if recipe == left else Tier.COLD.value, "muted")
        for recipe in state.recipes
        if recipe not in by_recipe
    ]
    return (*warm, *rest)


def holds(state: NodeState, tier: Tier) -> bool:
    """Whether a model of that tier is on the node."""
    return any(resident.tier is tier for resident in state.residents or ())


def _left_cached(state: NodeState) -> str | None:
    """Return the recipe of the shown run if all it left is what the kernel keeps for as long as it likes."""
    run = state.run
    return run.recipe if run is not None and run.state is RunState.READY and run.tier_to is Tier.CACHED else None


def next_start_ns(state: NodeState) -> int | None:
    """Return what the next start of the shown run's recipe will take from where it is warm now, as history has it."""
    run = state.run
    if run is None or not state.is_known:
        return None
    known = state.baselines.get((run.recipe_hash, next_tier(state, run.recipe, run.model), False))
    return known.wall_ns if known is not None else None


def next_tier(state: NodeState, recipe: str, model: str) -> Tier:
    """Return where the next start of a recipe will start from: an armed process counts if its weights are resident."""
    residents = state.residents or ()
    kept = {(one.model, one.device) for one in residents if one.name is not None}
    held = [
        one.tier
        for one in residents
        if (one.recipe == recipe and (one.tier is not Tier.ARMED or (one.model, one.device) in kept))
        or _is_shared(one, model)
    ]
    left = Tier.CACHED if _left_cached(state) else Tier.COLD
    return max([left, *held], key=list(Tier).index)


def _is_shared(resident: Resident, model: str) -> bool:
    """Whether what is held serves any recipe of a model: its files' bytes, and nothing made of them."""
    return resident.model == model and resident.tier in (Tier.CACHED, Tier.HOST)


def advice(failure: Failure | None, moment: Moment, *, is_open: bool = False) -> str:
    """Return one clause: what an operator does about a failure of this kind, with the keys as they are mapped."""
    if failure is not None and (known := ADVICE.get(failure.code)):
        return known
    look, again = moment.key("fleet.open"), moment.key("fleet.warm")
    if is_open:
        return f"{again} on the fleet screen tries again" if again else "its event log says what came before"
    return f"{look} shows why, {again} tries again" if again else f"{look} shows why"


ADVICE: dict[str, str] = {
    "out_of_memory": "release a warm model, then warm again",
    "stuck": "it hangs in the driver; see to the host",
    "interrupted": "its agent ended midway; warm again",
    "unreachable": "mend the link, then warm again",
}
