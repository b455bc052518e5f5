"""What is said of a rollout, line by line: how it stands, why it waits, its gates, its nodes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from console.rollout.others import Other
from console.rollout.saved import run_uid
from console.rollout.states import Ending, GateCount, NodeRow, NodeState, Phase, Verdict
from console.rollout.view import RolloutView
from console.state import NodeState as FleetNode
from console.widgets.paint import Line, Moment, plain, width_of
from console.widgets.rollout_cell import Scene, item_line
from console.widgets.rollout_head import gate_lines, holder_piece, node_lines, others_line, standing_line, waiting_lines
from console.widgets.rollout_layout import Item, lay_out
from tests.console.ui import rollout_scenes as scenes
from tests.console.ui import scenes as fleet_scenes
from tests.console.ui.rollout_scenes import ELSEWHERE, NODES, UID, view

KEYS = {f"rollout.{id}": key for id, key in (
    ("pause", "P"), ("resume", "c"), ("promote", "m"), ("promote_all", "M"), ("retry", "r"), ("skip", "s"),
    ("abort", "x"), ("start", "n"), ("list", "o"),
)}  # fmt: skip
MOMENT = Moment(fleet_scenes.NOW_MONO_NS, fleet_scenes.NOW_WALL_NS, keys=KEYS)
INCONCLUSIVE = replace(scenes.ANALYSIS, gates=(GateCount(0, 2, inconclusive=3, verdict=Verdict.INCONCLUSIVE),))


def scene(of: RolloutView | None = None, *nodes: FleetNode) -> Scene:
    known = {state.name: state for state in nodes or scenes.fleet()}
    return Scene(of or view(), known.get)


def text(lines: list[Line]) -> str:
    return " ".join(" ".join(plain(line) for line in lines).split())


def cell(name: str, of: Scene, width: int = 40) -> str:
    row = of.view.state.node(name)
    assert row is not None
    line = item_line(Item((row,)), of, width, MOMENT, is_selected=False)
    assert width_of(line) == width
    return " ".join(plain(line).split())


def test_one_line_says_how_it_stands() -> None:
    """Phase, name, batch, counts, failures, time; in a narrow terminal the phase and the counts are left."""
    assert " ".join(plain(standing_line(view(), 140, MOMENT)).split()) == (
        "● running eu-llama batch 2 of 3 ✔ 1 ready ● 2 under way ✖ 1 failed – 1 skipped ○ 3 pending 5 left failures 1/3"
        " 1 min 01 s"
    )
    assert "5 left  failures 1/3" in plain(standing_line(view(), 120, MOMENT))
    assert plain(standing_line(view(), 40, MOMENT)).rstrip() == " ● running ✔ 1  ● 2  ✖ 1  – 1  ○ 3"
    for width in range(10, 150):
        assert width_of(standing_line(view(), width, MOMENT)) == width


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (view(), "waits for 1 node warming, 1 node verifying, 1 node to be back in traffic, gate 1: sample 4 of 5, "
         "gate 2: sample 1 of 1 P pauses · x aborts"),
        (scenes.paused(), "waits for you: after batch 1 c goes on · M past all pauses"),
        (view(holder=None), "stands still c goes on in this console · x aborts"),
        (
            view(scenes.state([replace(NODES[2], failed_at_gate=True)], Phase.PAUSED, reason="gate 1 is failed")),
            "gate 1 is failed r tries a node again · s skips it · m goes on without",
        ),
        (
            view(scenes.state(phase=Phase.PAUSED, reason="gate 1 is inconclusive", analysis=INCONCLUSIVE)),
            "gate 1 is inconclusive c looks anew · m takes it as passed",
        ),
        (
            view(scenes.state([NodeRow("n1", 0, NodeState.UNKNOWN)], Phase.PAUSED, reason="restarted")),
            "restarted; what became of n1 is being read",
        ),
        (view(scenes.state(NODES[2:3], Phase.ABORTING, reason="by anna", analysis=None)),
         "by anna; gpu-eu-03: back into its traffic"),
        (view(scenes.state(phase=Phase.ABORTING, reason="by anna", analysis=None), None),
         "stands still; aborting: by anna x goes on with that in this console"),
        (view(scenes.state(phase=Phase.DONE, reason="7 ready")), "7 ready n starts one · o shows others"),
    ],
    ids=["running", "pause", "nobody", "failed gate", "inconclusive", "unread", "aborting", "aborting, nobody", "done"],
)  # fmt: skip
def test_why_it_waits_and_which_key_goes_on(made: RolloutView, words: str) -> None:
    """In each situation in which an operator is needed, and in those in which not."""
    assert text(waiting_lines(made, 200, MOMENT)) == words
    assert len(waiting_lines(made, 40, MOMENT)) <= 2


def test_who_carries_it_out_is_said() -> None:
    """In words, and by a sign."""
    said = [holder_piece(one)[0].strip() for one in (view(), view(holder=ELSEWHERE), view(holder=None))]

    assert said == ["● carried out here", "● carried out by build-7, process 4711", "✖ nobody carries it out"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gpu-eu-01", "✔ gpu-eu-01 ready 20.4 s"),
        ("gpu-eu-02", "● gpu-eu-02 weights 68 % 0.5 s"),
        ("gpu-eu-03", "✖ gpu-eu-03 is backed out"),
        ("gpu-eu-04", "● gpu-eu-04 gate 1, 3 of 5 7.0 s"),
        ("gpu-eu-05", "○ gpu-eu-05 pending"),
        ("gpu-eu-06", "– gpu-eu-06 skipped: its disk is bein…"),
        ("gpu-eu-07", "? gpu-eu-07 out of reach"),
        ("gpu-eu-08", "○ gpu-eu-08 again in 7 s"),
    ],
)
def test_a_cell_has_sign_name_and_word(name: str, words: str) -> None:
    """The stage where the node has the run, the time of its warm-up, a reason as far as it goes."""
    assert cell(name, scene()) == words
    assert cell(name, scene(), 14).startswith(words[:11])


def test_after_an_abort_nothing_is_pending_or_left() -> None:
    """What was begun is called off, the rest not begun: in counts, in cells, in the line of a node, folded or not."""
    nodes = (NODES[0], NodeRow("gpu-eu-02", 1, attempt=1, reason="aborted"), *(
        NodeRow(f"gpu-eu-0{number}", 1, is_down=number == 3) for number in range(3, 7)
    ))  # fmt: skip
    for phase in (Phase.ABORTING, Phase.ABORTED):
        made = view(scenes.state(nodes, phase, analysis=None))
        standing = " ".join(plain(standing_line(made, 120, MOMENT)).split())
        fold = Item(tuple(nodes[3:]))

        assert "✔ 1 ready – 1 called off ○ 4 not begun 0 left" in standing
        assert cell("gpu-eu-02", scene(made)) == "– gpu-eu-02 called off"
        assert cell("gpu-eu-03", scene(made)) == "○ gpu-eu-03 not begun"
        assert plain(item_line(fold, scene(made), 30, MOMENT, is_selected=False)).strip() == "○ 3 not begun"
        selected = text(node_lines("gpu-eu-02", frozenset(), scene(made), 80, MOMENT))
        assert selected.startswith("– gpu-eu-02 called off batch 2, attempt 1")


def test_what_a_hook_says_stands_beside_it_as_far_as_there_is_room() -> None:
    """In the cell cut, in the line of the selected node whole; where next to nothing of it fits not at all."""
    said = "weight 10%: llama/gpu-eu-02 is up, 3 sessions"
    shifting = replace(NODES[1], state=NodeState.SHIFTING, hook="shift")
    one = scene(replace(view(scenes.state([NODES[0], shifting])), said={"gpu-eu-02": said}))

    assert cell("gpu-eu-02", one, 80) == f"● gpu-eu-02 {said} shift 11.0 s"
    assert cell("gpu-eu-02", one, 43) == "● gpu-eu-02 weight 10%: ll… shift 11.0 s"
    assert cell("gpu-eu-02", one, 30) == "● gpu-eu-02 shift 11.0 s"
    assert text(node_lines("gpu-eu-02", frozenset(), one, 100, MOMENT)).endswith(said)


def test_a_node_out_of_sight_is_not_said_to_load() -> None:
    """Its link's state stands in the cell, and no stage; a node that the fleet has not shows its own state."""
    silent = fleet_scenes.silent("gpu-eu-02", run_uid(UID, "gpu-eu-02", 1))

    assert cell("gpu-eu-02", scene(None, silent)) == "● gpu-eu-02 ? silent 11.0 s"
    assert cell("gpu-eu-02", scene(None, fleet_scenes.cold("other"))) == "● gpu-eu-02 warming 11.0 s"


def test_no_time_is_told_by_a_clock_that_stands_still() -> None:
    """Of a rollout that nobody carries out; a run that goes on has its own."""
    left = view(holder=None)

    assert cell("gpu-eu-04", scene(left)) == "● gpu-eu-04 gate 1, 3 of 5"
    assert cell("gpu-eu-02", scene(left)) == "● gpu-eu-02 weights 68 % 0.5 s"


def test_gates_show_their_samples_what_comes_next_and_why_one_did_not_pass() -> None:
    """Live from the analysis; once it is over, what it came to stays."""
    lines = [plain(line).strip() for line in gate_lines(view(), 160, MOMENT)]
    over = [plain(line).strip() for line in gate_lines(view(scenes.state(analysis=None)), 160, MOMENT)]

    assert lines[0].startswith("1 first_output at most 0.5 s, 5 samples 2 s apart, 1 may fail  ✔✖✔··  ✔ 2 passed")
    assert lines[0].endswith("✖ 1 failed  ? 0 inconclusive  sample 4 of 5 is due")
    assert lines[1] == "last not passed: gpu-eu-04 took 0.61 s, over 0.5 s"
    assert lines[2].endswith("sample 1 of 1 is being taken")
    assert over[0].endswith("analysis 2, over")
    assert over[2] == "2 tier standby  ○ not looked at yet"


def test_the_selected_node_has_all_of_its_reason_and_its_keys() -> None:
    """Whatever the cell had room for."""
    lines = [
        plain(line).strip() for line in node_lines("gpu-eu-03", frozenset({"retry", "skip"}), scene(), 100, MOMENT)
    ]

    assert lines[0].startswith("✖ gpu-eu-03  failed  batch 2, attempt 2, out of traffic")
    assert lines[0].endswith("r tries again · s skips it")
    assert lines[1] == "compile: no kernel image for sm_90: torch 2.1 is built for sm_80"
    assert node_lines("no-such-node", frozenset(), scene(), 100, MOMENT) == []


def test_a_run_that_may_go_on_is_seen_in_its_cell_and_told_under_the_selected_node() -> None:
    """It is never folded away; the end of one that has not been asked for in vain is nobody's concern."""
    skipped = NodeRow("gpu-eu-06", 2, NodeState.SKIPPED, skip_reason="bad disk", endings=(Ending(1),))
    silent = replace(skipped, endings=(Ending(1, 3, is_asked=False, due_s=90.0, reason="no answer within 10 s"),))
    said, told = (scene(view(scenes.state((row,), analysis=None))) for row in (skipped, silent))

    assert cell("gpu-eu-06", said) == "– gpu-eu-06 skipped: bad disk"
    assert cell("gpu-eu-06", told) == "– gpu-eu-06 ? its run may go on there"
    assert "there: no answer within 10 s; it is asked again" in text(
        node_lines("gpu-eu-06", frozenset(), told, 120, MOMENT)
    )
    many = [replace(silent, name=f"gpu-{number}") for number in range(9)]
    plan = lay_out(many, 40, 4, None, folds=True, now_s=50.0)
    assert not any(item.is_fold for item in plan.columns[0].items)


def test_a_rollout_of_others_is_said_in_one_line_at_every_width() -> None:
    """How many nodes are out of traffic and the key stay longest."""
    others = (Other("1", "eu-llama", "paused", None, 1), Other("2", "lab", "running", ELSEWHERE, 0))
    wide, narrow = (plain(others_line(others, "o shows it", width, MOMENT)).strip() for width in (120, 64))

    left = "✖ rollout eu-llama: paused, nobody carries it out, 1 node out of traffic"
    assert wide == f"{left}; and 1 more rollout  o shows it"
    assert narrow == "✖ rollout eu-llama: paused, 1 node out of traffic  o shows it"
    for width in range(10, 140):
        assert width_of(others_line(others, "o shows it", width, MOMENT)) == width
