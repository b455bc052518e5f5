"""One node's panel: eight lines, what matters first. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from console.format import duration_text, size_text
from console.state import NodeState
from console.widgets.hardware import hardware_line
from console.widgets.node_view import Status, link_words, next_start_ns, node_status, tiers_of
from console.widgets.paint import Line, Moment, Piece, choose, fit, spread
from console.widgets.panel_body import body_lines

PANEL_HEIGHT = 8


@dataclass(frozen=True)
class Highlight:
    """What the operator has done to a node on screen."""

    selected: bool = False
    marked: bool = False


def panel_lines(state: NodeState, width: int, moment: Moment, highlight: Highlight) -> list[Line]:
    """Return `PANEL_HEIGHT` lines of exactly ``width`` cells."""
    inner = max(1, width - 4)
    status = node_status(state)
    body = body_lines(state, inner, moment)
    content = [hardware_line(state, inner, moment), _tier_line(state, inner, moment), *body]
    frame = _Frame(highlight, width, moment)
    lines = [frame.top(state, status)]
    lines += [frame.side(fit(line, inner, moment.glyphs)) for line in content]
    lines.append(frame.bottom(state))
    return lines


class _Frame:
    """The box around a panel; heavy where selected, so that it shows without colour too."""

    def __init__(self, highlight: Highlight, width: int, moment: Moment) -> None:
        self._highlight = highlight
        self._width = width
        self._moment = moment
        self._signs = "┏━┓┃┗┛" if highlight.selected else "┌─┐│└┘"
        self._role = "frame-selected" if highlight.selected else "frame"

    def top(self, state: NodeState, status: Status) -> Line:
        left: list[Piece] = [(f"{self._signs[0]} ", self._role)]
        if self._highlight.marked:
            left.append(("◆ ", "mark"))
        left += [(state.name, "title"), (" ", self._role)]
        right = [(" ", self._role), status.piece, (f" {self._signs[2]}", self._role)]
        return spread(left, right, self._width, self._moment.glyphs, fill=(self._signs[1], self._role))

    def side(self, inside: Line) -> Line:
        edge = self._moment.glyphs.text(self._signs[3])
        return ((f"{edge} ", self._role), *inside, (f" {edge}", self._role))

    def bottom(self, state: NodeState) -> Line:
        left: list[Piece] = [(self._signs[4], self._role)]
        if state.tags:
            left.append((f" {' '.join(state.tags)} ", "muted"))
        role = "faint" if state.is_known else "unknown"
        right = [(f" {link_words(state, self._moment)} ", role), (self._signs[5], self._role)]
        return spread(left, right, self._width, self._moment.glyphs, fill=(self._signs[1], self._role))


def _tier_line(state: NodeState, width: int, moment: Moment) -> Line:
    run = state.run
    if run is not None and not run.state.is_terminal:
        target = run.tier_to.value if run.tier_to else "warm"
        return fit([(run.recipe, "strong"), (f"  {run.tier_from.value} → {target}", "text")], width, moment.glyphs)
    tiers = tiers_of(state)
    if not tiers:
        return fit([("nothing is warm", "muted")], width, moment.glyphs)
    held = {resident.recipe: resident for resident in state.residents or ()}
    pieces: list[Piece] = []
    for recipe, tier, role in tiers:
        if pieces:
            pieces.append(("   ", "text"))
        shown = tier if state.is_known or tier.startswith("?") else f"? {tier}"
        pieces += [(recipe, "strong"), (f"  {shown}", role if state.is_known else "unknown")]
        if recipe in held and held[recipe].bytes:
            pieces.append((f" {size_text(held[recipe].bytes)}", "muted"))
        if recipe in held and held[recipe].attached:
            pieces.append((f" {held[recipe].attached} attached", "text"))
    options = [pieces]
    if (next_ns := next_start_ns(state)) is not None:
        options.insert(0, [*pieces, (f"  next {duration_text(next_ns)}", "muted")])
    return choose(options, width, moment.glyphs)
