"""Which nodes are shown, which one is selected, which are marked; by name, never by place. No Textual in here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence


class NodeSelection:
    """Keeps the selected node across every reordering and filtering.

    A node that stops matching by itself stays shown while it is selected, so that a key
    pressed at that moment still means the node that was seen. Only `narrow`, which the
    operator's own new filter calls, moves the selection to one that matches.
    """

    def __init__(self) -> None:
        self.shown: tuple[str, ...] = ()
        self.selected: str | None = None
        self.marked: set[str] = set()

    def update(self, ordered: Iterable[str], matches: Callable[[str], bool]) -> bool:
        """Show those of ``ordered`` that match, and the selected one; return whether anything changed."""
        names = tuple(ordered)
        shown = tuple(name for name in names if name == self.selected or matches(name))
        known = set(names)
        self.marked &= known
        if self.selected not in known:
            self.selected = shown[0] if shown else None
        changed = shown != self.shown
        self.shown = shown
        return changed

    def narrow(self, ordered: Iterable[str], matches: Callable[[str], bool]) -> None:
        """Show those that match a filter just given; a selection that is not among them goes to the first."""
        names = tuple(ordered)
        shown = tuple(name for name in names if matches(name))
        if self.selected not in shown:
            self.selected = shown[0] if shown else None
        self.shown = shown

    def select(self, name: str) -> bool:
        """Select ``name`` if it is shown; return whether that changed anything."""
        if name not in self.shown or name == self.selected:
            return False
        self.selected = name
        return True

    @property
    def index(self) -> int | None:
        """Where the selected node is now; only for drawing and for moving from there."""
        return self.shown.index(self.selected) if self.selected in self.shown else None

    def move(self, by: int) -> bool:
        """Select the node ``by`` places on, stopping at the ends; return whether the selection changed."""
        if not self.shown:
            return False
        index = self.index
        target = 0 if index is None else min(len(self.shown) - 1, max(0, index + by))
        return self.select(self.shown[target])

    def toggle_mark(self) -> None:
        if self.selected is not None:
            self.marked ^= {self.selected}

    def mark_shown(self) -> None:
        """Mark everything shown; unmark it where all of it was marked."""
        shown = set(self.shown)
        self.marked = self.marked - shown if shown <= self.marked else self.marked | shown

    def targets(self, order: Sequence[str]) -> tuple[str, ...]:
        """Return the marked nodes, hidden ones too, in fleet order; the selected one where none is marked."""
        if self.marked:
            return tuple(name for name in order if name in self.marked)
        return (self.selected,) if self.selected is not None else ()
