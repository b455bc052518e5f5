"""When samples make a gate pass, fail, or neither."""

from __future__ import annotations

from dataclasses import replace

from console.rollout.states import Analysis, GateCount, GateRule, Verdict


def count_sample(count: GateCount, rule: GateRule, verdict: Verdict, reason: str, now_s: float) -> GateCount:
    """Return the gate with one sample more; the next is due an interval from now, if it is still open."""
    passed = verdict is Verdict.PASS
    count = replace(
        count,
        passed=count.passed + passed,
        failed=count.failed + (verdict is Verdict.FAIL),
        inconclusive=count.inconclusive + (verdict is Verdict.INCONCLUSIVE),
        streak=count.streak + 1 if passed else 0,
        reason=count.reason if passed else reason,
        is_asked=False,
        due_s=now_s + rule.interval_s,
    )
    return replace(count, verdict=_decide(count, rule))


def _decide(count: GateCount, rule: GateRule) -> Verdict | None:
    """Fail past the limit; pass on a row, or when all were taken and none is inconclusive; never by default."""
    if count.failed > rule.failure_limit:
        return Verdict.FAIL
    if rule.consecutive_success is not None and count.streak >= rule.consecutive_success:
        return Verdict.PASS
    if count.taken < rule.count:
        return None
    if rule.consecutive_success is not None or count.inconclusive:
        return Verdict.INCONCLUSIVE
    return Verdict.PASS


def begin_analysis(
    number: int, nodes: tuple[str, ...], rules: tuple[GateRule, ...], batch: int, now_s: float
) -> Analysis:
    """Return an analysis in which nothing was sampled yet, of the gates that apply to that batch."""
    gates = tuple(GateCount(index, due_s=now_s) for index, rule in enumerate(rules) if rule.applies_to(batch))
    return Analysis(number, nodes, gates)


def describe(analysis: Analysis, verdict: Verdict) -> str:
    """Say which gate of an analysis has that verdict, and why; the why stands before what may be cut off."""
    gate = next(one for one in analysis.gates if one.verdict is verdict)
    why = f": {gate.reason}" if gate.reason else ""
    return f"gate {gate.gate + 1} {_WORDS[verdict]}{why} ({describe_count(gate)})"


def describe_count(gate: GateCount) -> str:
    """Say how many samples of a gate came to what."""
    return f"{gate.passed} passed, {gate.failed} failed, {gate.inconclusive} inconclusive"


_WORDS = {Verdict.PASS: "passed", Verdict.FAIL: "failed", Verdict.INCONCLUSIVE: "is inconclusive"}
