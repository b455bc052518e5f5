"""Lists to choose from whose keys do nothing where there is no room for a line: Textual would end the app then."""

from __future__ import annotations

from textual.command import CommandPalette
from textual.widgets import OptionList

_PAGES = ("page_up", "page_down")


def _has_room(options: OptionList) -> bool:
    """False before the first layout too; Textual has no line to move from then."""
    return bool(options.scrollable_content_region)


class ChoiceList(OptionList):
    """An `OptionList` in a terminal of any size."""

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return action not in _PAGES or _has_room(self)


class Palette(CommandPalette):
    """The command palette in a terminal of any size, also when keys come before it is drawn."""

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        moves = action == "command_list" and parameters[0] in _PAGES
        return not moves or all(map(_has_room, self.query(OptionList)))
