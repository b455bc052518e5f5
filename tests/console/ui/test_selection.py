"""The node an operator has chosen is a name: nothing that happens on hosts moves it."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from console.widgets.selection import NodeSelection

NAMES = ("a", "b", "c", "d", "e")


def among(*names: str) -> Callable[[str], bool]:
    return lambda name: name in names


def test_the_first_node_is_selected_at_first() -> None:
    """There is something to act on as soon as there is a node."""
    selection = NodeSelection()

    selection.update(NAMES, among(*NAMES))

    assert selection.selected == "a"


@given(
    st.lists(st.tuples(st.permutations(NAMES), st.sets(st.sampled_from(NAMES))), max_size=20), st.sampled_from(NAMES)
)
def test_no_reordering_and_no_change_of_state_moves_the_selection(
    happenings: list[tuple[list[str], set[str]]], chosen: str
) -> None:
    """A key pressed while panels move still means the node that was seen, and that node is still shown."""
    selection = NodeSelection()
    selection.update(NAMES, among(*NAMES))
    selection.select(chosen)

    for order, matching in happenings:
        selection.update(order, among(*matching))

        assert selection.selected == chosen
        assert selection.shown[selection.index or 0] == chosen


def test_a_new_filter_selects_something_that_it_shows() -> None:
    """The operator's own narrowing is the one thing that may move the selection."""
    selection = NodeSelection()
    selection.update(NAMES, among(*NAMES))

    selection.narrow(NAMES, among("c", "d"))

    assert selection.selected == "c"
    assert selection.shown == ("c", "d")


def test_a_node_that_stopped_matching_leaves_once_the_cursor_does() -> None:
    """It was kept for the key that might be on its way, no longer."""
    selection = NodeSelection()
    selection.update(NAMES, among("a", "b"))
    selection.update(NAMES, among("b", "c"))
    assert selection.shown == ("a", "b", "c")

    selection.move(1)
    selection.update(NAMES, among("b", "c"))

    assert selection.shown == ("b", "c")
    assert selection.selected == "b"


def test_a_node_that_is_gone_from_the_fleet_is_no_longer_chosen() -> None:
    """Neither selected nor marked."""
    selection = NodeSelection()
    selection.update(NAMES, among(*NAMES))
    selection.toggle_mark()

    selection.update(("b", "c"), among("b", "c"))

    assert selection.selected == "b"
    assert selection.marked == set()


def test_marked_nodes_are_the_target_also_where_a_filter_hides_them() -> None:
    """An action is never refused or changed because of what is displayed."""
    selection = NodeSelection()
    selection.update(NAMES, among(*NAMES))
    selection.marked |= {"e", "b"}

    selection.narrow(NAMES, among("a"))

    assert selection.targets(NAMES) == ("b", "e")


def test_marking_everything_shown_twice_unmarks_it() -> None:
    """Hidden marks stay as they are."""
    selection = NodeSelection()
    selection.update(NAMES, among("a", "b"))
    selection.marked.add("e")

    selection.mark_shown()
    assert selection.marked == {"a", "b", "e"}
    selection.mark_shown()

    assert selection.marked == {"e"}


def test_without_nodes_there_is_nothing_to_act_on() -> None:
    """Moving and marking nothing is harmless."""
    selection = NodeSelection()
    selection.update((), among())

    assert not selection.move(1)
    selection.toggle_mark()
    assert selection.targets(()) == ()
