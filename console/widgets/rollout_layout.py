"""Where the nodes of a rollout lie on the board: a column a batch, nodes alike in a row folded into one. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from console.rollout.states import BackOut, NodeRow, NodeState

COLUMN_CELLS, WIDEST_CELLS = 36, 64
FEWEST_FOLDED = 3
_FOLDED = (NodeState.PENDING, NodeState.READY, NodeState.SKIPPED)


@dataclass(frozen=True)
class Item:
    """One line of a column: a node, or several that have nothing to say apart."""

    nodes: tuple[NodeRow, ...]

    @property
    def is_fold(self) -> bool:
        return len(self.nodes) > 1


@dataclass(frozen=True)
class Column:
    """A batch, counted from 0, its nodes in order."""

    batch: int
    nodes: tuple[NodeRow, ...]
    items: tuple[Item, ...]


@dataclass(frozen=True)
class BoardLayout:
    """``width`` cells for as many columns as fit; ``height`` lines for their items."""

    columns: tuple[Column, ...] = ()
    width: int = 1
    height: int = 1
    places: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By node: its column, and the line that shows it, alone or folded."""

    @property
    def column_cells(self) -> int:
        """Columns share the width evenly; none is narrower than it can be read."""
        fit = max(1, min(self.width // COLUMN_CELLS, len(self.columns)))
        return max(1, min(self.width // fit, max(WIDEST_CELLS, self.width if fit == 1 else 0)))

    @property
    def lines(self) -> int:
        return max((len(column.items) for column in self.columns), default=0)

    def step(self, way: str, selected: str | None) -> str | None:
        """Return the node that ``way`` leads to from that one; the same where it leads nowhere."""
        if selected not in self.places:
            return next((node.name for column in self.columns for node in column.nodes), None)
        at, line = self.places[selected]
        if way in ("left", "right"):
            target = at + (1 if way == "right" else -1)
            if not 0 <= target < len(self.columns):
                return selected
            items = self.columns[target].items
            return items[min(line, len(items) - 1)].nodes[0].name
        items = self.columns[at].items
        by = {"up": -1, "down": 1, "page_up": -self.height, "page_down": self.height}
        line = {"home": 0, "end": len(items) - 1}.get(way, line + by.get(way, 0))
        nodes = items[min(len(items) - 1, max(0, line))].nodes
        return nodes[-1 if way in ("up", "end") else 0].name


def lay_out(
    nodes: Sequence[NodeRow], width: int, height: int, selected: str | None, *, folds: bool, now_s: float
) -> BoardLayout:
    """Return the board; a batch is folded only where it has more nodes than ``height`` lines, if ``folds``."""
    columns: list[Column] = []
    places: dict[str, tuple[int, int]] = {}
    for batch, members in groupby(nodes, key=lambda node: node.batch):
        rows = tuple(members)
        items = tuple(_items(rows, selected, now_s) if folds and len(rows) > height else map(_alone, rows))
        for line, item in enumerate(items):
            places.update((node.name, (len(columns), line)) for node in item.nodes)
        columns.append(Column(batch, rows, items))
    return BoardLayout(tuple(columns), max(1, width), max(1, height), places)


def _items(rows: Iterable[NodeRow], selected: str | None, now_s: float) -> Iterable[Item]:
    def alike(row: NodeRow) -> tuple[bool, NodeState, bool, str]:
        folds = row.name != selected and _has_nothing_to_say(row, now_s)
        was_begun = row.state is NodeState.PENDING and row.attempt > 0  # of which an abort says something else
        return folds, row.state, was_begun, "" if folds else row.name

    for (folds, *_), group in groupby(rows, key=alike):
        members = tuple(group)
        if folds and len(members) >= FEWEST_FOLDED:
            yield Item(members)
        else:
            yield from map(_alone, members)


def _alone(row: NodeRow) -> Item:
    return Item((row,))


def _has_nothing_to_say(row: NodeRow, now_s: float) -> bool:
    waits = row.state is NodeState.PENDING and row.due_s > now_s
    return (
        row.state in _FOLDED
        and not (row.is_down or row.is_out or row.endings or waits)
        and row.back_out is BackOut.NONE
    )
