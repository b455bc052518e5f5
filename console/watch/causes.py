"""Why a node fell below its tier: a stable word, and what its agent says. Pure."""

from __future__ import annotations

from console.watch.standing import Seen
from remote_agent.protocol.messages import Resident

PHRASES = (
    ("released by request", "released"),
    ("needed its room", "evicted"),
    ("its time to live", "expired"),
    ("Xid", "gpu_error"),
    ("uncorrectable ECC", "gpu_error"),
    ("the host was booted since", "host_rebooted"),
    ("the agent that held it has ended", "agent_restarted"),
    ("keeper", "keeper_ended"),
    ("its worker", "process_ended"),
)
"""What agents say of a model that is gone, and the cause that it is; the first that fits counts."""


def why_fell(before: Seen, now: Seen) -> tuple[str, str]:
    """Return the cause and a line of what made the tier ``before`` and does not any more."""
    reason = next((one.reason or "" for one in reversed(now.gone) if _is_of(one.resident, before)), "")
    if before.boot_id != now.boot_id:
        return "host_rebooted", "the host was booted since"
    for phrase, cause in PHRASES:
        if phrase in reason:
            return cause, reason
    if before.agent_pid != now.agent_pid and not reason:
        return "agent_restarted", "its agent was restarted, and has it no more"
    if before.held <= now.held and now.tier is not None:
        return "moved", f"it is {now.tier.value} now"
    return "gone", reason or "it is not there any more, and nothing told why"


def _is_of(one: Resident, before: Seen) -> bool:
    return (one.run_uid, one.device) in before.held
