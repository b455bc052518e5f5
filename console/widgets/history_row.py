"""One run as a row of the history, with how far it lies from its baseline."""

from __future__ import annotations

from dataclasses import dataclass

from console.format import date_text, delta_text, duration_text
from console.screens.ports import HistoryPort
from console.widgets.node_view import run_word
from console.widgets.paint import Moment, Piece
from db.records import Baseline, RunFilter, RunRow
from remote_agent.protocol.messages import Tier

COLUMNS = (
    ("When", "when"),
    ("Node", "node"),
    ("Recipe", "recipe"),
    ("State", "state"),
    ("Total", "total"),
    ("Δ", "delta"),
    ("First", "first"),
    ("Tiers", "tier"),
    ("Note", "note"),
)
OUTSIDE_FACTOR = 1.25
"""A run is outside its baseline when it took a quarter longer than the median."""


@dataclass(frozen=True)
class HistoryEntry:
    """``baseline`` is that of the runs before it, of the same node, recipe and tier, and as armed or not."""

    run: RunRow
    baseline: Baseline | None = None

    @property
    def is_outside(self) -> bool:
        wall_ns = self.run.wall_ns
        return bool(wall_ns and self.baseline and wall_ns > self.baseline.wall_ns * OUTSIDE_FACTOR)


def read_page(history: HistoryPort, wanted: RunFilter) -> tuple[HistoryEntry, ...]:
    """Return one page of runs with their baselines. Blocks: for a thread."""
    return tuple(HistoryEntry(run, _earlier(history, run)) for run in history.runs(wanted))


def _earlier(history: HistoryPort, run: RunRow) -> Baseline | None:
    if run.state != "ready":
        return None
    armed = run.tier_to == Tier.ARMED.value
    return history.baseline(run.node, run.recipe_hash, run.tier_from, before=run.run_uid, armed=armed)


def cells(entry: HistoryEntry, moment: Moment) -> tuple[Piece, ...]:
    """Return the row, one piece a column of `COLUMNS`."""
    run, baseline = entry.run, entry.baseline
    total = duration_text(run.wall_ns) if run.wall_ns is not None else ""
    delta = delta_text(run.wall_ns, baseline.wall_ns) if run.wall_ns and baseline else ""
    first = duration_text(run.first_output_ns) if run.first_output_ns is not None else ""
    tiers = f"{run.tier_from} → {run.tier_to}" if run.tier_to else run.tier_from
    return (
        (date_text(run.started_ns, moment.zone), "muted"),
        (run.node, "strong"),
        (run.recipe, "text"),
        run_word(run.state, is_known=run.state not in ("queued", "running")),
        (total.rjust(8), "text"),
        ((f"▲ {delta}" if entry.is_outside else delta).rjust(9), "warning" if entry.is_outside else "muted"),
        (first.rjust(7), "muted"),
        (tiers, "text"),
        (_note(run), "failed" if run.failure_detail else "muted"),
    )


def _note(run: RunRow) -> str:
    if run.failure_detail:
        return f"{run.failure_stage}: {run.failure_detail}" if run.failure_stage else run.failure_detail
    return " ".join((run.output or "").split())
