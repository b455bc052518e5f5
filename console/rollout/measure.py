"""What a gate says of a figure: pass, fail, or inconclusive where there is nothing to compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from console.format import NS_PER_S, duration_text
from console.rollout.settings import Gate
from console.rollout.states import Verdict
from db.records import Baseline
from remote_agent.protocol.messages import Resident, RunRecord, Tier

_TIERS = list(Tier)
_HELD = (Tier.HOST, Tier.RESIDENT, Tier.ARMED, Tier.PARKED, Tier.STANDBY)
"""Tiers that somebody on the node keeps up, and that its list of residents therefore shows."""


@dataclass(frozen=True)
class Sampled:
    """One sample of a gate. ``values``: by node, what was measured, for the timeline; ``share``: of its limit."""

    verdict: Verdict
    reason: str = ""
    values: Mapping[str, object] = field(default_factory=dict)
    share: float = 0.0


@dataclass(frozen=True)
class Figure:
    """``limit_ns``: at most so much passes. None for what is not known, and ``missing`` says why."""

    value_ns: int | None
    limit_ns: int | None
    missing: str = ""


def together(samples: Mapping[str, Sampled]) -> Sampled:
    """Return one verdict over nodes: fail if one fails, else inconclusive if one is, with that node's reason.

    A pass has the figure of the node that came nearest to its limit.
    """
    values = {name: {"verdict": one.verdict.value, **one.values} for name, one in samples.items()}
    for worst in (Verdict.FAIL, Verdict.INCONCLUSIVE):
        of = [f"{name}: {one.reason}" for name, one in samples.items() if one.verdict is worst]
        if of:
            more = f" (and {len(of) - 1} more)" if len(of) > 1 else ""
            return Sampled(worst, of[0] + more, values)
    return Sampled(Verdict.PASS, _nearest_to_limit(samples), values)


def _nearest_to_limit(samples: Mapping[str, Sampled]) -> str:
    figures = [(one.share, name, one.reason) for name, one in samples.items() if one.reason]
    if not figures:
        return ""
    _, name, figure = max(figures)
    return f"{name}: {figure}"


def judge_figure(measure: str, figure: Figure) -> Sampled:
    """Return the verdict on a figure, with both numbers."""
    if figure.value_ns is None or figure.limit_ns is None:
        return Sampled(Verdict.INCONCLUSIVE, figure.missing)
    values = {"value_ns": figure.value_ns, "limit_ns": figure.limit_ns}
    if figure.value_ns <= figure.limit_ns:
        text = f"{duration_text(figure.value_ns)}, within {duration_text(figure.limit_ns)}"
        return Sampled(Verdict.PASS, text, values, figure.value_ns / max(1, figure.limit_ns))
    text = f"{measure} {duration_text(figure.value_ns)}, over {duration_text(figure.limit_ns)}"
    return Sampled(Verdict.FAIL, text, values)


def run_figure(gate: Gate, run: RunRecord, baseline: Baseline | None) -> Figure:
    """Return what a run took, and may take by the gate."""
    measure = gate.measure or ""
    median_ns = _of_baseline(measure, baseline)
    return _figure(gate, _of_run(measure, run), f"the run has no {measure}", median_ns, run.tier_from)


def request_figure(gate: Gate, value_ns: int | None, baseline: Baseline | None, tier: Tier) -> Figure:
    """Return what one request to a warm model took. Its like in history is the first request of runs from ``tier``."""
    median_ns = baseline.stages_ns.get("first_request") if baseline is not None else None
    return _figure(gate, value_ns, f"the request has no {gate.measure}", median_ns, tier)


def _figure(gate: Gate, value_ns: int | None, missing: str, median_ns: int | None, tier: Tier) -> Figure:
    if value_ns is None:
        return Figure(None, None, missing)
    if gate.limit_s is not None:
        return Figure(value_ns, round(gate.limit_s * NS_PER_S))
    if median_ns is None:
        return Figure(value_ns, None, f"history has no {gate.measure} of a run from {tier.value} to compare with")
    return Figure(value_ns, round((gate.factor or 0.0) * median_ns))


def _of_run(measure: str, run: RunRecord) -> int | None:
    if measure == "total":
        return run.wall_ns
    if measure == "first_output":
        return run.first_output_ns
    return next((stage.duration_ns for stage in run.stages if stage.name == measure), None)


def _of_baseline(measure: str, baseline: Baseline | None) -> int | None:
    if baseline is None:
        return None
    if measure == "total":
        return baseline.wall_ns
    if measure == "first_output":
        return baseline.first_output_ns
    return baseline.stages_ns.get(measure)


def judge_tier(wanted: str, run: RunRecord, residents: Sequence[Resident]) -> Sampled:
    """Return whether a run reached that tier or a warmer one, and what it left there is still as warm."""
    if run.tier_to is None:
        return Sampled(Verdict.INCONCLUSIVE, "the run has no tier")
    values = {"tier": run.tier_to.value}
    if _TIERS.index(run.tier_to) < _TIERS.index(Tier(wanted)):
        return Sampled(Verdict.FAIL, f"tier {run.tier_to.value}, not {wanted}", values)
    if not is_still_warm(run, residents, Tier(wanted)):
        return Sampled(Verdict.FAIL, f"was {run.tier_to.value}, and is not warm any more", values)
    return Sampled(Verdict.PASS, "", values)


def is_still_warm(run: RunRecord, residents: Sequence[Resident], at_least: Tier | None = None) -> bool:
    """Whether what a ready run left warm is there, as far as its node would list it."""
    tier = at_least or run.tier_to
    if run.tier_to not in _HELD or tier not in _HELD:
        return True
    least = _TIERS.index(tier)
    return any(one.model == run.model and _TIERS.index(one.tier) >= least for one in residents)
