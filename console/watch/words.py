"""What is said of a watched node, as a line and as a document."""

from __future__ import annotations

from collections.abc import Mapping

from console.format import NS_PER_S, duration_text
from console.watch.machine import Told


def line(node: str, told: Told, wanted: str) -> str:
    """``gpu-1  fell to cold: released by request``"""
    return f"{node:<14} {_words(told, wanted)}"


def document(node: str, told: Told) -> Mapping[str, object]:
    """Return it as ``--json`` has it."""
    return {
        "node": node,
        "event": told.event,
        "tier": told.tier.value if told.tier else None,
        "cause": told.cause,
        "reason": told.reason,
        "again_s": round(told.again_s, 3) if told.again_s is not None else None,
    }


def _words(told: Told, wanted: str) -> str:
    tier = told.tier.value if told.tier else "not known"
    again = f"; again in {duration_text(told.again_s * NS_PER_S)}" if told.again_s is not None else ""
    match told.event:
        case "held":
            return f"is {tier}"
        case "below":
            return f"is {tier}, not {wanted}"
        case "fell":
            return f"fell to {tier}: {(told.cause or '').replace('_', ' ')}: {told.reason}"
        case "back":
            return f"is back: {tier}"
        case "warming":
            return f"is to be warmed to {wanted}"
        case "failed":
            return f"was not warmed: {told.reason}{again}"
        case "spent":
            return f"has had all its tries of this hour{again}"
        case "left_alone":
            return f"is left alone: {told.reason}"
        case "unreachable":
            return f"can't be reached, which says nothing of what is warm there: {told.reason}"
        case "reachable":
            return f"can be reached again: {tier}"
    return f"is not watched any more: {told.reason}"
