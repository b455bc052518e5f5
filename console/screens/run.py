"""One run: its stages over time against the previous one, what it said, and its events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Set
from typing import ClassVar, TypeVar

from textual.app import ComposeResult
from textual.binding import BindingType

from console.actions import Scope, bindings_of
from console.errors import GlowplugError
from console.screens.base import FOCUS_BINDINGS, ConsoleScreen
from console.screens.work import HostWork
from console.screens.workers import begin
from console.state import LogLine, NodeState, RunView, elapsed_ns
from console.widgets.header import title_line
from console.widgets.key_bar import KeyBar
from console.widgets.line_view import LineView
from console.widgets.node_view import run_word
from console.widgets.paint import Line, Moment
from console.widgets.run_head import head_lines, log_lines
from console.widgets.run_model import (
    Before,
    RunDetail,
    before_of_rows,
    detail_of_rows,
    detail_of_view,
    log_of_rows,
)
from console.widgets.waterfall import waterfall_lines
from db.errors import HistoryError

T = TypeVar("T")
SHORT = 20
"""Below this height the event log is shown only when asked for."""


class RunScreen(ConsoleScreen):
    """Live while the run is; out of the history once it is over or its node has forgotten it."""

    scope = Scope.RUN
    BINDINGS: ClassVar[list[BindingType]] = [*FOCUS_BINDINGS, *bindings_of(Scope.RUN)]
    AUTO_FOCUS = "#stages"

    def __init__(self, node: str, run_uid: str) -> None:
        super().__init__()
        self.node = node
        self.run_uid = run_uid
        self._stored: RunDetail | None = None
        self._stored_log: tuple[LogLine, ...] = ()
        self._before: Before | None = None
        self._problem: str | None = None
        self._read_over = False
        self._with_details = False
        self._log_wanted: bool | None = None
        self._situation: tuple[object, ...] = ()

    def compose(self) -> ComposeResult:
        self._header = LineView("header", glyphs=self.glyphs)
        self._head = LineView("head", glyphs=self.glyphs)
        self._stages = LineView("stages", glyphs=self.glyphs, focusable=True)
        self._events = LineView("log", glyphs=self.glyphs, wide=True, focusable=True)
        self._events.border_title = "Events"
        yield from (self._header, self._head, self._stages, self._events, KeyBar(self.glyphs))

    def on_mount(self) -> None:
        self.is_drawn = True
        begin(self, self._read, "read run")
        self._draw(self.console_app.moment())

    def on_resize(self) -> None:
        self.call_after_refresh(lambda: self._draw(self.console_app.moment()))

    # --- where it comes from -------------------------------------------------------------

    @property
    def _state(self) -> NodeState | None:
        fleet = self.console_app.fleet
        return fleet.state(self.node) if self.node in fleet.nodes else None

    @property
    def _view(self) -> RunView | None:
        return self._state.runs.get(self.run_uid) if self._state is not None else None

    @property
    def detail(self) -> RunDetail | None:
        """The run as its node tells it; as the history has it where the node does not, or not any more."""
        view = self._view
        return detail_of_view(self.node, view) if view is not None else self._stored

    async def _read(self) -> None:
        history = self.console_app.fleet.history
        try:
            stored = await self._ask(lambda: history.run(self.run_uid))
            previous = await self._ask(lambda: history.previous_run(self.run_uid))
            events = await self._ask(lambda: history.events(self.run_uid))
        except (HistoryError, GlowplugError) as error:
            self._problem = str(error)
        else:
            self._stored = detail_of_rows(*stored) if stored else None
            self._before = before_of_rows(*previous) if previous else None
            self._stored_log = log_of_rows(self.node, events)
            self._problem = None if stored or self._view else "the history has no such run"
        self._draw(self.console_app.moment())

    async def _ask(self, question: Callable[[], T]) -> T:
        return await asyncio.to_thread(question)

    # --- drawing ----------------------------------------------------------------------------

    def frame(self, dirty: Set[str], moment: Moment) -> None:
        view = self._view
        if view is not None and view.state.is_terminal and not self._read_over:
            self._read_over = True
            begin(self, self._read, "read run")
        if self.node in dirty or not dirty:
            self._draw(moment)

    def _draw(self, moment: Moment) -> None:
        if not self.is_drawn:
            return
        app = self.console_app
        title = title_line("Run", app.fleet_title, self._header.size.width, moment, paused=app.paused)
        self._header.show([title])
        detail = self.detail
        if detail is None:
            text = self._problem or f"reading run {self.run_uid[:8]} from the history"
            self._head.show([((text, "failed" if self._problem else "muted"),)])
            return
        self._draw_run(detail, moment)
        situation = (self.has_unfinished, self.has_warm, self.has_log)
        if situation != self._situation:
            self._situation = situation
            self.refresh_bindings()

    def _draw_run(self, detail: RunDetail, moment: Moment) -> None:
        state, view = self._state, self._view
        is_known = detail.is_over or (state is not None and state.is_known and view is not None)
        elapsed = elapsed_ns(view, state, moment.mono_ns) if view and state and is_known else detail.wall_ns
        lines = head_lines(
            detail, self._before, elapsed, max(20, self._head.scrollable_size.width), moment, is_known=is_known
        )
        if not is_known:
            lines.append(self._why_unknown(moment))
        self._head.show(lines)
        width = max(20, self._stages.scrollable_size.width)
        self._stages.show(waterfall_lines(detail, self._before, elapsed, width, moment, details=self._with_details))
        self._events.show(log_lines(self._log(), moment), follow=True)
        self._events.display = self._log_shown
        self.set_class(not self._log_shown or self.size.height < SHORT, "-short")

    def _why_unknown(self, moment: Moment) -> Line:
        state = self._state
        if state is None:
            return (
                ("this node is not in the fleet that is open; the run was unfinished when last heard of", "unknown"),
            )
        reason = f": {state.link.reason}" if state.link.reason else ""
        word = run_word("running", is_known=False)[0]
        return ((f"{word}: the node is {state.link.status.value}{reason}", "unknown"),)

    def _log(self) -> tuple[LogLine, ...]:
        """Stored events first, then what the node has told since."""
        live = tuple(line for line in (self._state.log if self._state else ()) if line.run_uid == self.run_uid)
        return live if len(live) >= len(self._stored_log) else self._stored_log

    @property
    def _log_shown(self) -> bool:
        return self.size.height >= SHORT if self._log_wanted is None else self._log_wanted

    # --- actions; see actions.Situation -----------------------------------------------------

    @property
    def has_unfinished(self) -> bool:  # type: ignore[override]
        return self._view is not None and not self._view.state.is_terminal

    @property
    def has_warm(self) -> bool:  # type: ignore[override]
        residents = self._state.residents if self._state else None
        return any(resident.run_uid == self.run_uid for resident in residents or ())

    @property
    def has_log(self) -> bool:  # type: ignore[override]
        return bool(self._log())

    def action_cancel(self) -> None:
        if self._state is not None:
            HostWork(self.console_app).cancel((self._state,), (self.node,), self.run_uid)

    def action_release(self) -> None:
        if self._state is not None:
            HostWork(self.console_app).release((self._state,), (self.node,), self.run_uid)

    def action_details(self) -> None:
        self._with_details = not self._with_details
        self._draw(self.console_app.moment())

    def action_log(self) -> None:
        self._log_wanted = not self._log_shown
        self._draw(self.console_app.moment())

    def copied_text(self) -> str | None:
        detail = self.detail
        if detail is None:
            return None
        reason = f": {detail.failure.detail}" if detail.failure else ""
        return self.glyphs.text(f"{detail.node} {detail.recipe} run {detail.run_uid} {detail.state}{reason}")
