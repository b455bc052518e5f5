"""What operators ask of a rollout, as an event for the machine, and what there is to say of it; pure."""

from __future__ import annotations

from collections.abc import Mapping

from console.rollout.events import Abort, Event, Pause, Promote, Resume, Retry, Skip
from console.rollout.states import NodeState, Phase, RolloutState

VERBS = ("pause", "resume", "promote", "retry", "skip", "abort")
WAITS_FOR_TRUTH = ("resume", "promote")
"""What can't be done while a node's state is not known."""


def verb_to_go_on(phase: Phase) -> str:
    """Return the verb that takes a rollout over which nobody carries out, and brings it on; an abort only ends."""
    return "abort" if phase is Phase.ABORTING else "resume"


def event_of(verb: str, arguments: Mapping[str, object], who: str) -> Event | None:
    """Return the event of a verb; None for a verb or arguments that this version does not know."""
    node, reason = str(arguments.get("node", "")), str(arguments.get("reason", ""))
    made: dict[str, Event] = {
        "pause": Pause(f"by {who}"),
        "resume": Resume(),
        "promote": Promote(everything=arguments.get("everything") is True),
        "retry": Retry(node),
        "skip": Skip(node, reason),
        "abort": Abort(f"by {who}"),
    }
    return made.get(verb)


def judge(event: Event, before: RolloutState, after: RolloutState) -> tuple[bool, str]:
    """Return whether what was asked was done, and one line on what came of it."""
    if before.phase.is_over:
        return False, f"it is over: {before.phase.value}"
    match event:
        case Pause():
            return _judge_pause(before, after)
        case Resume() | Promote():
            return _judge_going_on(event, before, after)
        case Retry() if before.phase is Phase.ABORTING:
            return False, "it is aborting"
        case Retry():
            return _judge_node(event.node, before, after, "is tried again", "can be tried again once it has failed")
        case Skip():
            return _judge_node(event.node, before, after, "is skipped", "can be skipped while it is not ready")
        case Abort():
            return True, f"it is {after.phase.value}"
    return False, "nothing is known of that"


def _judge_pause(before: RolloutState, after: RolloutState) -> tuple[bool, str]:
    if after.phase is not Phase.PAUSED:
        return False, f"it is {after.phase.value}"
    return True, "paused" if before.phase is Phase.RUNNING else f"it was paused already: {after.reason}"


def _judge_going_on(event: Resume | Promote, before: RolloutState, after: RolloutState) -> tuple[bool, str]:
    if before.phase is Phase.ABORTING:
        return False, "it is aborting"
    if before.phase is Phase.PAUSED:
        unread = any(row.state is NodeState.UNKNOWN for row in before.nodes)
        refused = isinstance(event, Resume) and any(row.failed_at_gate for row in before.nodes)
        if unread or refused:
            return False, after.reason
        return True, f"it went on and waits again: {after.reason}" if after.phase is Phase.PAUSED else "it goes on"
    everything = isinstance(event, Promote) and event.everything
    return (True, "it will not pause after a batch any more") if everything else (False, "it is running already")


def _judge_node(name: str, before: RolloutState, after: RolloutState, done: str, needs: str) -> tuple[bool, str]:
    row, now = before.node(name), after.node(name)
    if row is None or now is None:
        return False, f"no node {name} is in this rollout"
    if row == now:
        return False, f"{name} is {row.state.value}; it {needs}"
    waits = after.phase is Phase.PAUSED and now.state is NodeState.PENDING
    return True, f"{name} {done}" + ("; the rollout is paused: resume or promote it" if waits else "")
