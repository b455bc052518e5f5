"""What a screen is shown of a rollout, brought up to date read by read."""

from __future__ import annotations

from dataclasses import replace

import pytest

from console.rollout.states import NodeState, Phase
from console.rollout.view import LINES_KEPT, Look
from tests.console.ui import rollout_scenes as scenes
from tests.console.ui.rollout_scenes import ELSEWHERE, NODES, told, view
from tests.console.ui.scenes import MS, NOW_WALL_NS, S


def test_who_carries_it_out_is_told_by_the_lease() -> None:
    """This console, another, or nobody; one that has run out is nobody's."""
    late = replace(scenes.row(scenes.state()).lease, expires_ns=NOW_WALL_NS - 1)  # type: ignore[type-var]

    assert (view().holder, view().is_here) == (scenes.HERE, True)
    assert (view(holder=ELSEWHERE).holder, view(holder=ELSEWHERE).is_here) == (ELSEWHERE, False)
    assert view(holder=None).holder is None
    assert view(lease=late).holder is None


def test_the_machines_clock_goes_on_only_while_somebody_carries_it_out() -> None:
    """It was written a second ago, at 50 s."""
    assert view().now_s(NOW_WALL_NS) == 51.0
    assert view(holder=None).now_s(NOW_WALL_NS) == 50.0
    assert view().now_s(NOW_WALL_NS - 5 * S) == 50.0


def test_the_timeline_is_told_in_lines_with_what_they_mean() -> None:
    """A hook that failed is followed by what it printed; outcomes that went well say nothing."""
    tones = {one.text: one.tone for one in view().told}

    assert tones["anna@laptop: resume: it goes on"] == "asked"
    assert tones["gpu-eu-03: failed: compile: no kernel image for sm_90"] == "failed"
    assert tones["  backend eu/gpu-eu-03: no such server"] == "step"
    assert tones["paused: after batch 1"] == "odd"
    assert tones["gpu-eu-01: before_shift then warm"] == "step"


def test_what_is_read_later_is_added_and_the_rest_stays() -> None:
    """Lines, times of warm-ups, samples; a sample of a new analysis begins the gate's row anew."""
    first = view()
    later = (told("event", "GateSampled", analysis=3, gate=0, verdict="inconclusive", reason="no output"),)
    second = view(before=first, timeline=later)

    assert first.looks[0] == Look(2, ("pass", "fail", "pass"), "gpu-eu-04 took 0.61 s, over 0.5 s")
    assert second.looks[0] == Look(3, ("inconclusive",), "no output")
    assert second.warm_ns == {"gpu-eu-01": 20_430 * MS, "gpu-eu-04": 14_210 * MS}
    assert second.told[:-1] == first.told
    assert second.settings is first.settings
    assert view(before=first, timeline=()).told is first.told


def test_a_long_timeline_keeps_its_end_and_counts_the_rest() -> None:
    """Many lines go at a time, so that those that stay keep their place for a while."""
    entries = tuple(told("event", "NodeReached", f"n{number}", state="warming") for number in range(LINES_KEPT + 1))
    one = view(timeline=entries)

    assert len(one.told) + one.left_out == LINES_KEPT + 1
    assert len(one.told) <= LINES_KEPT
    assert one.told[-1].text == f"n{LINES_KEPT}: warming"
    again = view(before=one, timeline=entries[:10])
    assert again.left_out == one.left_out


@pytest.mark.parametrize(
    ("phase", "holder", "verbs"),
    [
        (Phase.RUNNING, scenes.HERE, {"pause", "abort", "promote_all"}),
        (Phase.PAUSED, ELSEWHERE, {"resume", "promote", "abort", "promote_all"}),
        (Phase.RUNNING, None, {"pause", "resume", "abort", "promote_all"}),
        (Phase.ABORTING, scenes.HERE, {"abort"}),
        (Phase.ABORTING, None, {"abort"}),
        (Phase.DONE, scenes.HERE, set()),
    ],
)
def test_a_verb_is_offered_where_the_machine_would_do_it(phase: Phase, holder: str | None, verbs: set[str]) -> None:
    """Where nobody carries the rollout out, this console would: by resume and abort, by abort alone while it aborts."""
    nodes = [node for node in NODES if node.state is not NodeState.FAILED]

    assert view(scenes.state(nodes, phase), holder).possible == verbs


def test_a_verb_on_a_node_is_offered_where_it_would_do_something() -> None:
    """A failed one can be tried again or skipped, one that waits only skipped, one that is ready neither."""
    one = view()

    assert one.node_verbs("gpu-eu-03") == {"retry", "skip"}
    assert one.node_verbs("gpu-eu-05") == {"skip"}
    assert one.node_verbs("gpu-eu-01") == frozenset()
    assert one.node_verbs("no-such-node") == frozenset()
