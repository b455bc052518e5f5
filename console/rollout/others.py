"""Rollouts that are not over and that this console does not carry out, and who does. Pure."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass

from db.rollout_records import Unfinished
from db.rollout_store import lease_of


@dataclass(frozen=True)
class Other:
    """``holder``: who carries it out, None for nobody. ``nodes_out``: how many are out of traffic."""

    rollout_uid: str
    name: str
    phase: str
    holder: str | None
    nodes_out: int


def others_of(rows: Iterable[Unfinished], carried: Container[str], now_ns: int) -> tuple[Other, ...]:
    """Return those of ``rows`` whose uids are not ``carried``; what nobody carries out comes first."""
    others = []
    for row in rows:
        if row.rollout_uid not in carried:
            lease = lease_of(row, now_ns)
            holder = lease.holder if lease is not None else None
            others.append(Other(row.rollout_uid, row.name, row.phase, holder, row.nodes_out))
    return tuple(sorted(others, key=lambda one: one.holder is not None))


def carrier_words(holder: str | None) -> str:
    """Say who carries a rollout out that this console does not."""
    if holder is None:
        return "nobody carries it out"
    host, _, rest = holder.partition(":")
    return f"carried out by {host}, process {rest.partition(':')[0]}"
