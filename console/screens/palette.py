"""What the command palette offers besides actions: nodes to go to, and themes, ours first."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, cast

from textual.command import DiscoveryHit, Hit, Hits, Provider
from textual.content import Content

import themes

if TYPE_CHECKING:
    from console.app import GlowplugApp

NODES_LISTED = 50


class NodeCommands(Provider):
    """``Go to gpu-eu-01``: selects that node on the fleet screen, whatever is filtered.

    `Content` is made of the plain text: the matcher's own highlighting reads markup.
    """

    @property
    def _console_app(self) -> GlowplugApp:
        return cast("GlowplugApp", self.app)

    async def search(self, query: str) -> Hits:
        matcher = self.matcher(query)
        found = 0
        for name in self._console_app.fleet.nodes:
            text = f"Go to {self._console_app.glyphs.text(name)}"
            if (score := matcher.match(text)) > 0 and found < NODES_LISTED:
                found += 1
                yield Hit(score, Content(text), partial(self._console_app.go_to, name), text=text)


class ThemeCommands(Provider):
    """All themes; a choice is kept for the next start."""

    @property
    def _choices(self) -> list[tuple[str, Callable[[], None]]]:
        ours = [name for name in themes.NAMES if name in self.app.available_themes]
        others = sorted(set(self.app.available_themes) - set(ours))
        return [(name, partial(setattr, self.app, "theme", name)) for name in (*ours, *others)]

    async def discover(self) -> Hits:
        for name, choose in self._choices:
            yield DiscoveryHit(Content(name), choose, text=name)

    async def search(self, query: str) -> Hits:
        matcher = self.matcher(query)
        for name, choose in self._choices:
            if (score := matcher.match(name)) > 0:
                yield Hit(score, Content(name), choose, text=name)
