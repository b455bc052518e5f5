"""Every run there was, newest first, a page at a time; read in threads, drawn here."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence, Set
from dataclasses import replace
from functools import partial
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.widgets import DataTable, Input
from textual.worker import Worker

from console.actions import Scope, bindings_of
from console.errors import GlowplugError
from console.screens.base import FOCUS_BINDINGS, ConsoleScreen
from console.screens.run import RunScreen
from console.screens.workers import begin
from console.widgets.header import title_line
from console.widgets.history_row import COLUMNS, HistoryEntry, cells, read_page
from console.widgets.key_bar import KeyBar
from console.widgets.line_view import LineView
from console.widgets.node_filter import FilterError
from console.widgets.paint import Moment, Piece
from console.widgets.run_filter import parse_run_filter
from console.widgets.run_table import RunTable
from db.errors import HistoryError
from db.records import RunFilter

PAGE = 100
PLACEHOLDER = "node:NAME  recipe:NAME  state:failed  since:7d"


class HistoryScreen(ConsoleScreen):
    """The cursor stays on its run whatever arrives above it."""

    scope = Scope.HISTORY
    BINDINGS: ClassVar[list[BindingType]] = [*FOCUS_BINDINGS, *bindings_of(Scope.HISTORY)]
    AUTO_FOCUS = "RunTable"

    def __init__(self) -> None:
        super().__init__()
        self.entries: tuple[HistoryEntry, ...] = ()
        self.selected: str | None = None
        self._wanted = RunFilter(limit=PAGE)
        self._total: int | None = None
        self._is_whole = False
        self._reading: Worker[None] | None = None
        self._over: dict[str, bool] = {}

    def compose(self) -> ComposeResult:
        self._header = LineView("header", glyphs=self.glyphs)
        self._table = RunTable(self.glyphs, id="runs")
        self._empty = LineView("empty", glyphs=self.glyphs)
        self._input = Input(placeholder=PLACEHOLDER, id="filter", compact=True)
        yield from (self._header, self._table, self._empty, self._input, KeyBar(self.glyphs))

    def on_mount(self) -> None:
        self.is_drawn = True
        self._input.display = False
        for label, key in COLUMNS:
            self._table.add_column(self.glyphs.text(label), key=key)
        self.app.theme_changed_signal.subscribe(self, lambda _: self._show(self.entries))
        self._show_header(self.console_app.moment())
        self._load()

    # --- reading -----------------------------------------------------------------------

    def _load(self, *, more: bool = False) -> None:
        is_reading = self._reading is not None and not self._reading.is_finished
        if more and (self._is_whole or is_reading):
            return
        self._reading = begin(self, partial(self._read, more), "read history", group="history", exclusive=True)

    async def _read(self, more: bool) -> None:
        history = self.console_app.fleet.history
        wanted = self._wanted
        if more and self.entries:
            wanted = replace(wanted, before_ns=self.entries[-1].run.started_ns + 1)
        try:
            page = await asyncio.to_thread(read_page, history, wanted)
            self._total = await asyncio.to_thread(history.count)
        except (HistoryError, GlowplugError) as error:
            self.console_app.say(str(error), "error")
            return
        if not self._table.is_attached:  # left meanwhile: widgets lose their styles before their screen's workers end
            return
        known = {entry.run.run_uid for entry in self.entries} if more else set()
        fresh = tuple(entry for entry in page if entry.run.run_uid not in known)
        self._is_whole = len(page) < wanted.limit or not fresh
        self._show((*self.entries, *fresh) if more else fresh)

    def _show(self, entries: Sequence[HistoryEntry]) -> None:
        """Fill the table anew and put the cursor back on its run, by uid."""
        table, moment = self._table, self.console_app.moment()
        keep = self.selected
        self.entries = tuple(entries)
        table.clear()
        for entry in self.entries:
            table.add_row(*(table.cell(piece) for piece in cells(entry, moment)), key=entry.run.run_uid)
        uids = [entry.run.run_uid for entry in self.entries]
        if keep in uids:
            table.move_cursor(row=uids.index(keep), animate=False)
        self.selected = keep if keep in uids else uids[0] if uids else None
        self._show_header(moment)
        self._empty.show([((" no run fits" if self._wanted_text else " no run yet", "muted"),)])
        self._empty.display = not uids
        self.refresh_bindings()

    # --- drawing --------------------------------------------------------------------------

    def frame(self, dirty: Set[str], moment: Moment) -> None:
        """Read the newest runs again when one of a node's has ended."""
        self._show_header(moment)
        ended = False
        for name in dirty:
            for run_uid, run in self.console_app.fleet.state(name).runs.items():
                over = run.state.is_terminal
                ended |= run_uid in self._over and over and not self._over[run_uid]
                self._over[run_uid] = over
        if ended and len(self.entries) <= PAGE:
            self._load()

    @property
    def _wanted_text(self) -> str:
        return self._input.value.strip()

    def _show_header(self, moment: Moment) -> None:
        app = self.console_app
        aside: list[Piece] = []
        if self._wanted_text:
            aside.append((f" filter {self._wanted_text} ", "accent"))
        if self._total is not None:
            shown = len(self.entries)
            aside.append((f" {shown} of {self._total} runs ", "muted"))
        title = title_line("History", app.fleet_title, self._header.size.width, moment, paused=app.paused, aside=aside)
        self._header.show([title])

    # --- the cursor ------------------------------------------------------------------------

    def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        if event.row_key.value is None or event.cursor_row != self._table.cursor_row:
            return  # on its way since before the table was filled anew
        self.selected = event.row_key.value
        if event.cursor_row >= len(self.entries) - 10:
            self._load(more=True)

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        self.selected = event.row_key.value
        self.action_open()

    @property
    def has_target(self) -> bool:  # type: ignore[override]
        return self.selected is not None

    # --- actions ----------------------------------------------------------------------------

    def action_open(self) -> None:
        entry = next((entry for entry in self.entries if entry.run.run_uid == self.selected), None)
        if entry is not None:
            self.app.push_screen(RunScreen(entry.run.node, entry.run.run_uid))

    def action_reload(self) -> None:
        self._load()

    def action_filter(self) -> None:
        self._input.display = True
        self._input.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        try:
            self._wanted = parse_run_filter(event.value, self.console_app.moment().wall_ns, PAGE)
        except FilterError:
            self._input.add_class("-wrong")
            return
        self._input.remove_class("-wrong")
        self._load()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        try:
            parse_run_filter(event.value, 0, PAGE)
        except FilterError as error:
            self.console_app.say(str(error), "warning")
            return
        self._close_filter()

    def _close_filter(self) -> None:
        self._input.display = bool(self._input.value)
        self._table.focus()

    def go_back(self) -> None:
        if self._input.has_focus:
            self._close_filter()
        elif self._input.value:
            self._input.value = ""
            self._input.display = False
        else:
            super().go_back()

    def copied_text(self) -> str | None:
        return self.selected
