"""Where nodes lie on the board of a rollout: folds, and a cursor that reaches everything."""

from __future__ import annotations

import pytest

from console.rollout.states import NodeRow, NodeState, Phase, RolloutState
from console.widgets.rollout_layout import BoardLayout, lay_out
from tests.console.ui import rollout_scenes as scenes


def board(
    state: RolloutState, selected: str | None = None, width: int = 120, height: int = 14, folds: bool = True
) -> BoardLayout:
    return lay_out(state.nodes, width, height, selected, folds=folds, now_s=50.0)


def texts(layout: BoardLayout, column: int) -> list[str]:
    items = layout.columns[column].items
    return [f"{len(item.nodes)} {item.nodes[0].state.value}" if item.is_fold else item.nodes[0].name for item in items]


def test_a_batch_that_fits_shows_every_node() -> None:
    """Nothing is folded where there is room."""
    layout = board(scenes.state())

    assert texts(layout, 2) == ["gpu-eu-05", "gpu-eu-06", "gpu-eu-07", "gpu-eu-08"]
    assert [len(column.nodes) for column in layout.columns] == [1, 3, 4]


def test_nodes_that_were_begun_fold_apart_from_those_that_were_not() -> None:
    """After an abort the ones are called off, the others were never begun."""
    nodes = [NodeRow(f"n{number}", 0, attempt=int(number < 4)) for number in range(8)]

    assert texts(board(scenes.state(nodes, Phase.ABORTED), height=3), 0) == ["4 pending", "4 pending"]


def test_a_long_batch_folds_what_has_nothing_to_say_and_never_what_has() -> None:
    """Of 300 nodes those under way, the failed one and the selected one stay in sight."""
    layout = board(scenes.long(), "gpu-eu-030")
    working = [f"gpu-eu-{number:03}" for number in range(61, 74)]

    assert texts(layout, 1) == ["28 ready", "gpu-eu-030", "30 ready", *working, "77 pending"]
    assert texts(layout, 2) == ["150 pending"]
    assert texts(board(scenes.long(), folds=False), 1)[:2] == ["gpu-eu-002", "gpu-eu-003"]


@pytest.mark.parametrize(
    "odd",
    [{"is_down": True}, {"is_out": True}, {"attempt": 1, "due_s": 60.0}],
    ids=["down", "out of traffic", "waits for its next try"],
)
def test_a_node_of_which_more_is_to_be_said_is_not_folded(odd: dict[str, object]) -> None:
    """Though it is pending as its neighbours are."""
    nodes = [NodeRow(f"n{number}", 0) for number in range(20)]
    nodes[9] = NodeRow("n9", 0, **odd)  # type: ignore[arg-type]

    assert texts(board(scenes.state(nodes)), 0) == ["9 pending", "n9", "10 pending"]


@pytest.mark.parametrize("way", ["down", "up"])
def test_the_cursor_reaches_every_node_line_by_line(way: str) -> None:
    """Also those in a fold, which opens around it; at the ends it stops."""
    state = scenes.long(40)
    names = [node.name for node in state.nodes if node.batch == 1]
    wanted = names if way == "down" else names[::-1]
    selected: str | None = wanted[0]
    seen = [selected]
    for _ in wanted:
        selected = board(state, selected, height=5).step(way, selected)
        seen.append(selected)

    assert seen == [*wanted, wanted[-1]]


def test_left_and_right_go_from_batch_to_batch() -> None:
    """To the same line, or the last one where there is none; at the ends they lead nowhere."""
    layout = board(scenes.state())

    assert layout.step("right", "gpu-eu-04") == "gpu-eu-07"
    assert layout.step("left", "gpu-eu-04") == "gpu-eu-01"
    assert layout.step("left", "gpu-eu-01") == "gpu-eu-01"
    assert layout.step("right", "gpu-eu-08") == "gpu-eu-08"
    assert layout.step("end", "gpu-eu-05") == "gpu-eu-08"
    assert layout.step("home", "gpu-eu-08") == "gpu-eu-05"
    assert layout.step("down", None) == "gpu-eu-01"


@pytest.mark.parametrize(("width", "cells"), [(40, 40), (80, 40), (120, 40), (240, 64)])
def test_columns_share_the_width_and_none_is_too_narrow_to_read(width: int, cells: int) -> None:
    """What does not fit is scrolled to."""
    assert board(scenes.state(), width=width).column_cells == cells


def test_a_rollout_of_many_batches_has_a_column_for_each() -> None:
    """One node a batch: 300 columns."""
    nodes = [NodeRow(f"n{number}", number, NodeState.READY) for number in range(300)]
    layout = board(scenes.state(nodes))

    assert len(layout.columns) == 300
    assert layout.step("right", "n7") == "n8"
