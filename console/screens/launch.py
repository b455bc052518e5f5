"""Chooses a recipe and nodes, names them once more, and starts; what became of each start stays in sight."""

from __future__ import annotations

import uuid
from collections.abc import Sequence, Set
from functools import partial
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.validation import Integer
from textual.widgets import Button, Input, Label, OptionList
from textual.widgets.option_list import Option

from console.actions import Scope, bindings_of
from console.format import counted
from console.operations import Outcome, carry_out, node_line
from console.screens.base import FOCUS_BINDINGS, ConsoleScreen
from console.screens.confirm import ConfirmScreen
from console.widgets.header import title_line
from console.widgets.key_bar import KeyBar
from console.widgets.launch_view import node_choice, outcome_line, recipe_lines
from console.widgets.line_view import LineView
from console.widgets.node_choice import NodeChoice
from console.widgets.paint import Line, Moment
from remote_agent.protocol.messages import Recipe

PARALLEL_MAX = 256


class LaunchScreen(ConsoleScreen):
    """A display filter never takes a node away: every node of the fleet can be chosen here."""

    scope = Scope.LAUNCH
    BINDINGS: ClassVar[list[BindingType]] = [*FOCUS_BINDINGS, *bindings_of(Scope.LAUNCH)]
    AUTO_FOCUS = "#recipes"

    def __init__(self, chosen: Sequence[str]) -> None:
        super().__init__()
        self._chosen = tuple(chosen)
        self._recipe: Recipe | None = None
        self._runs: dict[str, str] = {}
        self._errors: dict[str, str] = {}

    def compose(self) -> ComposeResult:
        text, recipes = self.glyphs.text, self.console_app.fleet.config.recipes
        at_once = str(self.console_app.fleet.parallel)
        self._header = LineView("header", glyphs=self.glyphs)
        self._recipes = OptionList(*(Option(Content(text(name))) for name in recipes), id="recipes")
        self._facts = LineView("recipe", glyphs=self.glyphs)
        self._choice = NodeChoice(self._ordered(), self._chosen, self._line_of, self.glyphs, id="nodes")
        self._outcomes = LineView("outcomes", glyphs=self.glyphs)
        self._parallel = Input(at_once, validators=[Integer(1, PARALLEL_MAX)], id="parallel", compact=True)
        self._button = Button(Content("Warm"), id="start", variant="primary", compact=True)
        yield self._header
        with VerticalScroll(id="body", can_focus=False):
            with Horizontal(id="top"):
                with Vertical(id="recipe-box"):
                    yield self._recipes
                yield self._facts
            yield self._choice
            yield self._outcomes
        with Horizontal(id="options"):
            yield Label(Content("At once "))
            yield self._parallel
            yield Button(Content("Go back"), id="back", compact=True)
            yield self._button
        yield KeyBar(self.glyphs)

    def on_mount(self) -> None:
        self.is_drawn = True
        self.query_one("#recipe-box").border_title = "Recipe"
        self._choice.border_title = "Nodes"
        if self._recipes.option_count:
            self._recipes.highlighted = 0
        else:
            self._facts.show([(("No recipes. `glowplug config example` shows how one is written.", "text"),)])
        self._show_counts()

    @property
    def recipe(self) -> Recipe | None:
        """The recipe under the cursor."""
        index = self._recipes.highlighted
        recipes = list(self.console_app.fleet.config.recipes.values())
        return recipes[index] if index is not None and index < len(recipes) else None

    @property
    def nodes(self) -> tuple[str, ...]:
        """The chosen nodes, in fleet order."""
        chosen = self._choice.chosen
        return tuple(name for name in self.console_app.fleet.nodes if name in chosen)

    # --- drawing ---------------------------------------------------------------------------

    def _ordered(self) -> list[str]:
        """The nodes that were chosen before come first, where they are seen."""
        return sorted(self.console_app.fleet.nodes, key=lambda name: name not in self._chosen)

    def _line_of(self, name: str) -> Line:
        return node_choice(self.console_app.fleet.state(name), self._recipe)

    def frame(self, dirty: Set[str], moment: Moment) -> None:
        app = self.console_app
        title = title_line("Warm", app.fleet_title, self._header.size.width, moment, paused=app.paused)
        self._header.show([title])
        self._choice.renew(dirty)
        self._show_outcomes(moment)

    def _show_outcomes(self, moment: Moment) -> None:
        fleet = self.console_app.fleet
        lines = [
            outcome_line(node, run_uid, self._errors.get(node), fleet.state(node), moment)
            for node, run_uid in self._runs.items()
        ]
        self._outcomes.show(lines)
        self._outcomes.display = bool(lines)

    def _show_counts(self) -> None:
        nodes = self.nodes
        label = f"Warm {counted(len(nodes), 'node')}…" if nodes else "Choose nodes"
        self._button.label = Content(self.glyphs.text(label))
        self._button.disabled = not nodes or self.recipe is None or self.console_app.read_only

    def on_option_list_option_highlighted(self, event: OptionList.OptionHighlighted) -> None:
        if event.option_list.id == "recipes" and self.recipe is not None:
            self._facts.show(recipe_lines(self.recipe))
            self._recipe = self.recipe
            self._choice.renew(self.console_app.fleet.nodes)
            self._show_counts()

    async def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        if event.option_list.id == "recipes":
            await self.run_action("start")

    def on_node_choice_changed(self) -> None:
        self._show_counts()

    async def on_button_pressed(self, event: Button.Pressed) -> None:
        if event.button.id == "start":
            await self.run_action("start")
        else:
            self.go_back()

    def action_all_nodes(self) -> None:
        self._choice.toggle_all()

    # --- starting ---------------------------------------------------------------------------

    def action_start(self) -> None:
        recipe, nodes = self.recipe, self.nodes
        if recipe is None or not nodes:
            self.console_app.say("choose a recipe and at least one node", "warning")
            return
        if not self._parallel.is_valid:
            self.console_app.say(f"at once: a number from 1 to {PARALLEL_MAX}", "warning")
            return
        at_once = int(self._parallel.value)
        question = f"Warm {recipe.name} on {counted(len(nodes), 'node')}, {min(at_once, len(nodes))} at once?"
        lines = [node_line(name) for name in nodes]
        dialog = ConfirmScreen(question, lines, f"Warm {counted(len(nodes), 'node')}", grave=False)
        self.console_app.ask(dialog, partial(self._start, recipe.name, nodes, at_once))

    async def _start(self, recipe_name: str, nodes: Sequence[str], at_once: int) -> None:
        fleet = self.console_app.fleet
        fleet.parallel = at_once
        self._errors.clear()
        self._runs = {name: uuid.uuid4().hex for name in nodes}
        calls = [partial(fleet.warm, name, recipe_name, run_uid=run_uid) for name, run_uid in self._runs.items()]
        outcomes = await carry_out(nodes, calls, self._told)
        failed = [outcome for outcome in outcomes if outcome.error is not None]
        if len(failed) < len(outcomes):
            self.console_app.say(f"{recipe_name} starts on {counted(len(outcomes) - len(failed), 'node')}")
        if not failed and self.is_current:
            self.app.pop_screen()

    def _told(self, outcome: Outcome) -> None:
        if outcome.error is None:
            return
        self._errors[outcome.node] = outcome.error
        self.console_app.say(f"{outcome.node}: {outcome.error}", "error")
        if self in self.app.screen_stack:
            self._show_outcomes(self.console_app.moment())
