"""A list of nodes to choose from; what is chosen shows as ``[x]``, without colour too, and is kept by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from textual.content import Content
from textual.message import Message
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from console.widgets.glyphs import Glyphs
from console.widgets.paint import Line

_STYLES = {
    "title": "bold",
    "ready": "$success",
    "running": "$warning",
    "warning": "$warning",
    "failed": "bold $error",
    "unknown": "$secondary",
    "muted": "$foreground 65%",
    "waiting": "$foreground 65%",
}


class NodeChoice(OptionList):
    """Enter, space or a click takes a node in or out. Nodes are never dropped from view."""

    class Changed(Message):
        """Other nodes are chosen now."""

    def __init__(
        self, names: Iterable[str], chosen: Iterable[str], line_of: Callable[[str], Line], glyphs: Glyphs, *, id: str
    ) -> None:
        self._glyphs = glyphs
        self._line_of = line_of
        self._names = tuple(names)
        self.chosen = set(chosen)
        super().__init__(*(Option(self._prompt(name)) for name in self._names), id=id)

    def _prompt(self, name: str) -> Content:
        mark = ("[x] ", "bold $accent") if name in self.chosen else ("[ ] ", "$foreground 65%")
        pieces = [(self._glyphs.text(text), _STYLES.get(role, "")) for text, role in self._line_of(name)]
        return Content.assemble(mark, *pieces)

    def renew(self, names: Iterable[str]) -> None:
        """Draw those nodes as they are now."""
        wanted = set(names)
        for index, name in enumerate(self._names):
            if name in wanted:
                prompt = self._prompt(name)
                if prompt != self.get_option_at_index(index).prompt:
                    self.replace_option_prompt_at_index(index, prompt)

    def toggle_all(self) -> None:
        """Choose every node; none where all were."""
        self.chosen = set() if len(self.chosen) == len(self._names) else set(self._names)
        self.renew(self._names)
        self.post_message(self.Changed())

    def key_space(self) -> None:
        self.action_select()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        name = self._names[event.option_index]
        self.chosen ^= {name}
        self.renew({name})
        self.post_message(self.Changed())
