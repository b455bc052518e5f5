"""A rollout: batches as columns, nodes as cells, gates with their samples, the timeline, and a key for each verb.

One place reads the history, in a thread, about twice a second while the screen is open; everything drawn comes from
that and from the fleet's states. What carries rollouts out lives in the app and does not end with this screen.
"""

from __future__ import annotations

from collections.abc import Set
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.worker import Worker

from console.actions import Scope, bindings_of
from console.errors import GlowplugError
from console.rollout.others import Other
from console.rollout.saved import run_uid
from console.rollout.view import RolloutView
from console.screens.base import FOCUS_BINDINGS, ConsoleScreen
from console.screens.rollout_work import RolloutWork
from console.screens.run import RunScreen
from console.screens.workers import begin
from console.state import NodeState
from console.widgets.header import title_line
from console.widgets.key_bar import KeyBar
from console.widgets.line_view import LineView
from console.widgets.paint import Moment, Piece
from console.widgets.rollout_board import RolloutBoard
from console.widgets.rollout_cell import Scene
from console.widgets.rollout_head import (
    gate_lines,
    holder_piece,
    node_lines,
    others_line,
    standing_line,
    summary_text,
    timeline_lines,
    waiting_lines,
)

READ_EVERY_S = 0.5
SHORT = 20
"""Below this height gates and timeline are shown only when asked for."""

GATES_MOST = 6
BOARD_SHARE = 0.6
"""Of what is left beside head, node and gates; the timeline has the rest."""

LEAST_LINES = 4
BARS = 3
"""The top line, the selected node's, the keys."""


class RolloutScreen(ConsoleScreen):
    """Shows the rollout of ``rollout_uid``; without one, the newest that is not over, or the newest."""

    scope = Scope.ROLLOUT
    BINDINGS: ClassVar[list[BindingType]] = [*FOCUS_BINDINGS, *bindings_of(Scope.ROLLOUT)]
    AUTO_FOCUS = "RolloutBoard"

    def __init__(self, rollout_uid: str | None = None) -> None:
        super().__init__()
        self.rollout_uid = rollout_uid
        self.view: RolloutView | None = None
        self._others: tuple[Other, ...] = ()
        self._problem: str | None = None
        self._has_read = False
        self._reading: Worker[None] | None = None
        self._log_wanted: bool | None = None
        self._situation: tuple[object, ...] = ()
        self._drawn: RolloutView | None = None
        self._verbs_of: tuple[RolloutView, str, frozenset[str]] | None = None
        self._fleet_nodes: frozenset[str] = frozenset()

    def compose(self) -> ComposeResult:
        glyphs = self.glyphs
        self._header = LineView("header", glyphs=glyphs)
        self._head = LineView("standing", glyphs=glyphs)
        self.board = RolloutBoard(self.console_app.moment())
        self._node = LineView("node", glyphs=glyphs)
        self._gates = LineView("gates", glyphs=glyphs)
        self._gates.border_title = "Gates"
        self._timeline = LineView("log", glyphs=glyphs, wide=True, focusable=True)
        self._timeline.border_title = "Timeline"
        yield from (self._header, self._head, self.board, self._node, self._gates, self._timeline)
        yield KeyBar(glyphs)

    def on_mount(self) -> None:
        self.is_drawn = True
        self._fleet_nodes = frozenset(self.console_app.fleet.nodes)
        self.set_interval(READ_EVERY_S, self.read)
        self.read()
        self._draw(self.console_app.moment())

    def on_resize(self) -> None:
        self.call_after_refresh(lambda: self._draw(self.console_app.moment()))

    # --- where it comes from --------------------------------------------------------------

    def read(self) -> None:
        """Read the rollout anew, unless that is under way."""
        if self._reading is None or self._reading.is_finished:
            self._reading = begin(self, self._read, "read rollout")

    async def _read(self) -> None:
        rollouts = self.console_app.rollouts
        try:
            if self.rollout_uid is None:
                rows = await rollouts.listed()
                newest = [row for row in rows if row.finished_ns is None] or list(rows)
                self.rollout_uid = newest[0].rollout_uid if newest else None
            uid = self.rollout_uid
            view = await rollouts.read(uid) if uid is not None else None
            is_over = view is not None and view.state.phase.is_over
            others = await rollouts.others() if is_over else ()
            if uid == self.rollout_uid:
                self.view, self._others, self._problem = view, others, None
        except GlowplugError as error:
            self._problem = str(error)
        self._has_read = True
        if not self.console_app.paused:
            self._draw(self.console_app.moment())

    def show_rollout(self, rollout_uid: str) -> None:
        """Look at that rollout from now on."""
        if rollout_uid != self.rollout_uid:
            self.rollout_uid, self.view = rollout_uid, None
        self.read()

    def _node_state(self, name: str) -> NodeState | None:
        return self.console_app.fleet.state(name) if name in self._fleet_nodes else None

    # --- drawing ----------------------------------------------------------------------------

    def frame(self, dirty: Set[str], moment: Moment) -> None:
        self._draw(moment, dirty)

    def _draw(self, moment: Moment, dirty: Set[str] = frozenset()) -> None:
        if not self.is_drawn:
            return
        app, view = self.console_app, self.view
        aside: list[Piece] = [holder_piece(view)] if view is not None else []
        if app.read_only:
            aside.append((" read only ", "accent"))
        width = max(1, self.size.width)
        self._header.show([title_line("Rollout", app.fleet_title, width, moment, paused=app.paused, aside=aside)])
        if view is None:
            self._show_nothing(moment)
        else:
            self._draw_view(view, dirty, width, moment)
        situation = (self.rollout_verbs, self.has_target, self.has_log)
        if situation != self._situation:
            self._situation = situation
            self.refresh_bindings()

    def _show_nothing(self, moment: Moment) -> None:
        key = moment.key("rollout.start")
        text = "no rollout was ever started here" + (f"; {key} starts one of fleet.toml" if key else "")
        if self.rollout_uid is not None or not self._has_read:
            text = "reading the history"
        problem = self._problem
        self._head.show([((f" {problem or text}", "failed" if problem else "text"),)])
        self.board.display = self._node.display = self._gates.display = self._timeline.display = False

    def _draw_view(self, view: RolloutView, dirty: Set[str], width: int, moment: Moment) -> None:
        scene, board = Scene(view, self._node_state), self.board
        board.moment = moment
        lines = [standing_line(view, width, moment), *waiting_lines(view, width, moment)]
        if self._problem is not None:
            lines.append(((f" as read before: {self._problem}", "failed"),))
        if self._others:
            key = moment.key("rollout.list")
            lines.append(others_line(self._others, f"{key} lists it" if key else "", width, moment))
        self._head.show(lines)
        is_short = self.size.height < SHORT
        gates = gate_lines(view, max(1, width - 2), moment)[:GATES_MOST]
        timeline_shown = not is_short if self._log_wanted is None else self._log_wanted
        board.display = not (is_short and timeline_shown)
        taken = len(lines) + BARS + (0 if is_short else len(gates) + 1)
        room = self.size.height - taken
        board.set_most_lines(max(LEAST_LINES, round(room * BOARD_SHARE) if timeline_shown else room))
        if view is not self._drawn:
            board.show(scene)
            self._timeline.show(tuple(timeline_lines(view, moment)), follow=True)
            self._drawn = view
        else:
            board.repaint(dirty)
        node = node_lines(board.selected, self._node_verbs, scene, width, moment)
        self._node.show(node[:1] if is_short else node)
        self._node.display = board.display
        self._gates.show(gates)
        self._gates.display = bool(gates) and not is_short
        self._timeline.display = timeline_shown
        self.set_class(is_short, "-short")

    # --- actions; see actions.Situation -------------------------------------------------------

    @property
    def rollout_verbs(self) -> frozenset[str]:  # type: ignore[override]
        """What could be done now, to the rollout and to the selected node of it."""
        return self.view.possible | self._node_verbs if self.view is not None and self.is_drawn else frozenset()

    @property
    def _node_verbs(self) -> frozenset[str]:
        """Those to the selected node, found out once for each state."""
        view, name = self.view, self.board.selected
        if view is None or name is None:
            return frozenset()
        if self._verbs_of is None or self._verbs_of[0] is not view or self._verbs_of[1] != name:
            self._verbs_of = (view, name, view.node_verbs(name))
        return self._verbs_of[2]

    @property
    def has_target(self) -> bool:  # type: ignore[override]
        return self.view is not None and self.board.selected is not None

    @property
    def has_log(self) -> bool:  # type: ignore[override]
        return self.view is not None

    @property
    def _work(self) -> RolloutWork:
        return RolloutWork(self.console_app, self.show_rollout)

    def action_start(self) -> None:
        self._work.start()

    def action_list(self) -> None:
        self._work.choose()

    def action_hold(self) -> None:
        if self.view is not None:
            self._work.ask(self.view, "pause")

    def action_resume(self) -> None:
        if self.view is not None:
            self._work.ask(self.view, "resume")

    def action_promote(self) -> None:
        if self.view is not None:
            self._work.promote(self.view, everything=False)

    def action_promote_all(self) -> None:
        if self.view is not None:
            self._work.promote(self.view, everything=True)

    def action_abort(self) -> None:
        if self.view is not None:
            self._work.abort(self.view)

    def action_retry(self) -> None:
        if self.view is not None and self.board.selected is not None:
            self._work.retry(self.view, self.board.selected)

    def action_skip(self) -> None:
        if self.view is not None and self.board.selected is not None:
            self._work.skip(self.view, self.board.selected)

    def action_open(self) -> None:
        """Open the run of the selected node's attempt."""
        view, name = self.view, self.board.selected
        row = view.state.node(name) if view is not None and name is not None else None
        if view is None or row is None:
            return
        if not row.attempt:
            self.console_app.say(f"{row.name}: no attempt was made yet")
            return
        self.app.push_screen(RunScreen(row.name, run_uid(view.row.rollout_uid, row.name, row.attempt)))

    def action_fold(self) -> None:
        self.board.fold(not self.board.folds)

    def action_log(self) -> None:
        self._log_wanted = not self._timeline.display
        self._draw(self.console_app.moment())

    def action_move(self, way: str) -> None:
        self.board.move(way)
        self._draw(self.console_app.moment())

    def on_rollout_board_selected(self) -> None:
        self._draw(self.console_app.moment())

    def on_rollout_board_opened(self) -> None:
        self.action_open()

    def copied_text(self) -> str | None:
        """The selected node with its reason; without one the rollout."""
        view, name = self.view, self.board.selected
        if view is None:
            return None
        row = view.state.node(name) if name is not None else None
        if row is None:
            return self.glyphs.text(summary_text(view))
        reason = row.skip_reason or row.reason
        return self.glyphs.text(f"{row.name}: {view.state.word(row)}{': ' if reason else ''}{reason}")
