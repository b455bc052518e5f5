"""The fleet: every node at a glance, and what an operator does to the ones chosen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.widgets import Input
from textual.worker import Worker

from console.actions import Scope, bindings_of
from console.errors import GlowplugError
from console.rollout.others import Other
from console.screens.base import FOCUS_BINDINGS, ConsoleScreen
from console.screens.work import HostWork
from console.screens.workers import begin
from console.state import NodeState, unfinished_runs
from console.widgets.fleet_view import FleetView, Layout
from console.widgets.header import header_line
from console.widgets.key_bar import KeyBar
from console.widgets.line_view import LineView
from console.widgets.node_filter import FilterError, NodeFilter, parse_filter
from console.widgets.node_view import URGENCY, Status, holds, node_status
from console.widgets.paint import Line, Moment, Piece
from console.widgets.rollout_head import others_line
from console.widgets.selection import NodeSelection
from remote_agent.protocol.messages import Tier

READ_ROLLOUTS_S = 2.0
SMALL_WIDTH, SMALL_HEIGHT = 60, 16
PLACEHOLDER = "name  tag:prod  state:failed  recipe:llama  -tag:test"


class FleetScreen(ConsoleScreen):
    """Keeps the operator's choice by name; see `NodeSelection`."""

    scope = Scope.FLEET
    BINDINGS: ClassVar[list[BindingType]] = [*FOCUS_BINDINGS, *bindings_of(Scope.FLEET)]
    AUTO_FOCUS = "FleetView"

    def __init__(self) -> None:
        super().__init__()
        self.selection = NodeSelection()
        self._filter = NodeFilter()
        self._by_urgency = False
        self._statuses: dict[str, Status] = {}
        self._situation: tuple[object, ...] = ()
        self._full_frame_s = 0.0
        self._others: tuple[Other, ...] = ()
        self._reading: Worker[None] | None = None

    def compose(self) -> ComposeResult:
        app = self.console_app
        self._header = LineView("header", glyphs=self.glyphs)
        self._notices = LineView("notices", glyphs=self.glyphs)
        self.view = FleetView(self.selection, app.fleet.state, app.moment())
        self._input = Input(placeholder=PLACEHOLDER, id="filter", compact=True)
        yield from (self._header, self._notices, self.view, self._input, KeyBar(self.glyphs))

    def on_mount(self) -> None:
        self._input.display = False
        self._count(self.console_app.fleet.nodes)
        self._arrange()
        if self.app.size.width < SMALL_WIDTH and self.app.size.height < SMALL_HEIGHT:
            self.view.set_layout(Layout.LIST)
        self.is_drawn = True
        self.view.redraw()
        self.frame(set(), self.console_app.moment())
        self.set_interval(READ_ROLLOUTS_S, self.read_rollouts)
        self.read_rollouts()

    def _state(self, name: str) -> NodeState:
        return self.console_app.fleet.state(name)

    # --- rollouts of others ------------------------------------------------------------

    def read_rollouts(self) -> None:
        """Read anew which rollouts others carry out, or nobody, unless that is under way."""
        if self._reading is None or self._reading.is_finished:
            self._reading = begin(self, self._read_rollouts, "read rollouts")

    async def _read_rollouts(self) -> None:
        try:
            self._others = await self.console_app.rollouts.others()
        except GlowplugError:  # what is wrong with the history is said by whatever is asked of it
            self._others = ()
        if self.is_drawn and not self.console_app.paused:
            self._show_notices(self.console_app.moment())

    # --- frames ----------------------------------------------------------------------

    def frame(self, dirty: Set[str], moment: Moment) -> None:
        self.view.moment = moment
        self._count(dirty)
        if dirty and self._arrange():
            self.view.redraw()
        elif moment.mono_s - self._full_frame_s >= 1.0:
            self._full_frame_s = moment.mono_s
            self.view.repaint(self.view.visible_names())
        else:
            self.view.repaint(dirty)
        self._show_header(moment)
        self._show_notices(moment)
        self._situation_changed()

    def _count(self, names: Sequence[str] | Set[str]) -> None:
        for name in names:
            self._statuses[name] = node_status(self._state(name))

    def _arrange(self) -> bool:
        """Order and filter anew; return whether other nodes are shown, or in another order."""
        return self.selection.update(self._ordered(), self._matches)

    def _ordered(self) -> Sequence[str]:
        names = self.console_app.fleet.nodes
        if not self._by_urgency:
            return names
        return sorted(names, key=lambda name: URGENCY.index(self._statuses[name]))

    def _matches(self, name: str) -> bool:
        return self._filter.matches(self._state(name))

    def _show_header(self, moment: Moment) -> None:
        app = self.console_app
        aside: list[Piece] = []
        if marked := len(self.selection.marked):
            aside.append((f" ◆ {marked} marked ", "mark"))
        if self._filter.terms:
            aside.append((f" filter {self._filter.text}: {len(self.selection.shown)} shown ", "accent"))
        aside += [(f" rollout {name} {state.phase.value} ", "accent") for name, state in app.rollouts.carried.items()]
        if app.read_only:
            aside.append((" read only ", "accent"))
        counts = Counter(self._statuses.values())
        width = max(1, self.size.width)
        self._header.show([header_line(app.fleet_title, counts, aside, width, moment, paused=app.paused)])

    def _show_notices(self, moment: Moment) -> None:
        lines: list[Line] = []
        if self._others:
            lines.append(others_line(self._others, self._others_hint(moment), max(1, self.size.width), moment))
        lines += [((f" {text}", "warning"),) for text in self.console_app.fleet.notices[-2:]]
        if not self.console_app.fleet.nodes:
            lines.append(((" No nodes. `glowplug config example` writes a fleet.toml to start from.", "text"),))
        self._notices.show(lines)
        self._notices.display = bool(lines)

    def _others_hint(self, moment: Moment) -> str:
        key = moment.key("fleet.rollout")
        return f"{key} shows {'rollouts' if self.console_app.rollouts.carried else 'it'}" if key else ""

    # --- what actions find: see actions.Situation ---------------------------------------

    def targets(self) -> tuple[str, ...]:
        return self.selection.targets(self.console_app.fleet.nodes)

    def _target_states(self) -> tuple[NodeState, ...]:
        return tuple(self._state(name) for name in self.targets())

    @property
    def has_target(self) -> bool:  # type: ignore[override]
        return self.selection.selected is not None

    @property
    def has_unfinished(self) -> bool:  # type: ignore[override]
        return any(unfinished_runs(state) for state in self._target_states())

    @property
    def has_warm(self) -> bool:  # type: ignore[override]
        return any(state.residents for state in self._target_states())

    @property
    def has_standby(self) -> bool:  # type: ignore[override]
        return any(holds(state, Tier.STANDBY) for state in self._target_states())

    @property
    def has_parked(self) -> bool:  # type: ignore[override]
        return any(holds(state, Tier.PARKED) for state in self._target_states())

    @property
    def has_lost_link(self) -> bool:  # type: ignore[override]
        return any(not state.is_known for state in self._target_states())

    def _situation_changed(self) -> None:
        warm = (self.has_warm, self.has_standby, self.has_parked)
        situation = (self.has_target, self.has_unfinished, *warm, self.has_lost_link)
        if situation != self._situation:
            self._situation = situation
            self.refresh_bindings()

    def copied_text(self) -> str | None:
        """The name of the selected node, with why its run failed or its link is down."""
        if self.selection.selected is None:
            return None
        state = self._state(self.selection.selected)
        reason = state.link.reason if not state.is_known else None
        if state.run is not None and state.run.failure is not None and reason is None:
            reason = state.run.failure.detail
        return self.glyphs.text(f"{state.name}: {reason}" if reason else state.name)

    # --- moving, marking, arranging --------------------------------------------------------

    def _selection_changed(self) -> None:
        self.view.selection_changed()
        self._show_header(self.view.moment)
        self._situation_changed()

    def on_fleet_view_selected(self) -> None:
        self._selection_changed()

    def on_fleet_view_opened(self, message: FleetView.Opened) -> None:
        self._open(message.name)

    def select(self, name: str) -> None:
        """Select that node, clearing a filter that hides it."""
        if name not in self.selection.shown:
            self._input.value = ""
            self._apply_filter("")
        self.selection.select(name)
        self._selection_changed()

    def action_move(self, way: str) -> None:
        index = self.selection.index
        by = self.view.grid.step(way, index, self.view.size.height) if index is not None else 0
        if self.selection.move(by):
            self._selection_changed()

    def action_mark(self) -> None:
        self.selection.toggle_mark()
        self._selection_changed()

    def action_mark_all(self) -> None:
        self.selection.mark_shown()
        self._selection_changed()

    def action_unmark(self) -> None:
        self.selection.marked.clear()
        self._selection_changed()

    def action_layout(self) -> None:
        self.view.set_layout(Layout.LIST if self.view.layout_kind is Layout.GRID else Layout.GRID)

    def action_sort(self) -> None:
        self._by_urgency = not self._by_urgency
        self._arrange()
        self.view.redraw()
        self.view.reveal()

    def action_filter(self) -> None:
        self._input.display = True
        self._input.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        self._apply_filter(event.value)

    def on_input_submitted(self) -> None:
        self._close_filter()

    def _apply_filter(self, text: str) -> None:
        try:
            self._filter = parse_filter(text)
        except FilterError as error:
            self._input.add_class("-wrong")
            self.console_app.say(str(error), "warning")
            return
        self._input.remove_class("-wrong")
        self.selection.narrow(self._ordered(), self._matches)
        self.view.redraw()
        self._selection_changed()

    def _close_filter(self) -> None:
        self._input.display = bool(self._input.value)
        self.view.focus()

    def go_back(self) -> None:
        """Step by step: leave the filter, clear it, unmark everything."""
        if self._input.has_focus:
            self._close_filter()
        elif self._filter.terms or self._input.value:
            self._input.value = ""
            self._input.display = False
        elif self.selection.marked:
            self.action_unmark()

    # --- acting ------------------------------------------------------------------------------

    def action_open(self) -> None:
        if self.selection.selected is not None:
            self._open(self.selection.selected)

    def _open(self, name: str) -> None:
        from console.screens.run import RunScreen

        run_uid = self._state(name).latest_run
        if run_uid is None:
            self.console_app.say(f"{name}: no run yet; w warms a model there")
            return
        self.app.push_screen(RunScreen(name, run_uid))

    def action_history(self) -> None:
        from console.screens.history import HistoryScreen

        self.app.push_screen(HistoryScreen())

    def action_rollout(self) -> None:
        from console.screens.rollout import RolloutScreen

        leads = bool(self._others) and not self.console_app.rollouts.carried
        self.app.push_screen(RolloutScreen(self._others[0].rollout_uid if leads else None))

    def action_warm(self) -> None:
        from console.screens.launch import LaunchScreen

        self.app.push_screen(LaunchScreen(self.targets()))

    def action_cancel(self) -> None:
        HostWork(self.console_app).cancel(self._target_states(), self.selection.shown)

    def action_release(self) -> None:
        HostWork(self.console_app).release(self._target_states(), self.selection.shown)

    def action_park(self) -> None:
        HostWork(self.console_app).park(self._target_states(), self.selection.shown)

    def action_unpark(self) -> None:
        HostWork(self.console_app).unpark(self._target_states(), self.selection.shown)

    def action_probe(self) -> None:
        HostWork(self.console_app).probe(self.targets())

    def action_retry(self) -> None:
        for state in self._target_states():
            if not state.is_known:
                self.console_app.fleet.retry_now(state.name)
