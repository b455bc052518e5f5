"""Twenty rounds of faults, one of each kind; ``make faults`` plays more."""

from __future__ import annotations

import pytest

from tests.console.sshd import sshd_binary
from tests.faults.__main__ import describe, play_all
from tests.faults.rounds import TARGETS, VERBS, WAYS, plan_of

pytestmark = [pytest.mark.faults, pytest.mark.ssh, pytest.mark.timeout(400)]

SEEDS = range(20)
JOBS = 4


def test_twenty_seeds_in_a_row_strike_everything_in_both_ways() -> None:
    """A seed's plan is always the same, and no kind of process is left out."""
    plans = [plan_of(seed) for seed in range(40, 60)]

    assert plans == [plan_of(seed) for seed in range(40, 60)]
    kinds = {(plan.verb, plan.target, plan.way) for plan in plans}
    assert kinds == {(verb, target, way) for verb in VERBS for target in TARGETS for way in WAYS}


def test_nothing_is_lost_doubled_shifted_too_early_or_forgotten() -> None:
    """sshd, bridge, agent, worker and console, killed and stopped at a drawn moment of a run and of a rollout."""
    sshd_binary()
    reports = play_all(SEEDS, JOBS, lambda report: None)

    assert [describe(report) for report in reports if report.problem] == []
    assert len(reports) == len(SEEDS)
    assert sum(report.checked.events for report in reports) > 1000
