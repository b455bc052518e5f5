"""Every action of the app, once: keys, footer, help and command palette all come from here.

An action that `changes` something on a host exists only outside read-only mode; a
`dangerous` one asks first, naming what it will touch. Ids never change: operators
remap keys by them.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from textual.binding import Binding, BindingType


class Situation(Protocol):
    """What a screen can say about what an action would have to work on."""

    @property
    def has_target(self) -> bool: ...
    @property
    def has_unfinished(self) -> bool: ...
    @property
    def has_warm(self) -> bool: ...
    @property
    def has_standby(self) -> bool: ...
    @property
    def has_parked(self) -> bool: ...
    @property
    def has_lost_link(self) -> bool: ...
    @property
    def has_log(self) -> bool: ...
    @property
    def rollout_verbs(self) -> frozenset[str]: ...


class Scope(enum.Enum):
    """Which screen an action belongs to."""

    APP = "everywhere"
    FLEET = "fleet"
    LAUNCH = "launch"
    RUN = "run"
    HISTORY = "history"
    ROLLOUT = "rollout"
    DIALOG = "dialogs"
    PROMPT = "questions of a login"


def _always(_: Situation) -> bool:
    return True


@dataclass(frozen=True)
class Action:
    """``keys`` as Textual writes them; ``name`` is the method ``action_NAME`` of its screen or of the app."""

    id: str
    keys: str
    name: str
    label: str
    tooltip: str
    group: str
    scope: Scope
    footer: bool = False
    changes: bool = False
    dangerous: bool = False
    priority: bool = False
    palette: bool = True
    available: Callable[[Situation], bool] = _always

    @property
    def method(self) -> str:
        """The bare method name, without the arguments it is called with."""
        return self.name.partition("(")[0]

    def binding(self) -> Binding:
        return Binding(
            self.keys,
            self.name,
            self.label,
            show=self.footer,
            tooltip=self.tooltip,
            id=self.id,
            priority=self.priority,
            group=Binding.Group(self.group),
        )


def _target(situation: Situation) -> bool:
    return situation.has_target


def _unfinished(situation: Situation) -> bool:
    return situation.has_unfinished


def _warm(situation: Situation) -> bool:
    return situation.has_warm


def _standby(situation: Situation) -> bool:
    return situation.has_standby


def _parked(situation: Situation) -> bool:
    return situation.has_parked


def _lost_link(situation: Situation) -> bool:
    return situation.has_lost_link


def _log(situation: Situation) -> bool:
    return situation.has_log


def _verb(verb: str) -> Callable[[Situation], bool]:
    return lambda situation: verb in situation.rollout_verbs


def _move(id: str, keys: str, name: str, tooltip: str, scope: Scope = Scope.FLEET) -> Action:
    return Action(id, keys, name, id.partition(".")[2], tooltip, "Move", scope, palette=False)


A, F, S = Action, Scope, Scope
ACTIONS: tuple[Action, ...] = (
    # Fleet
    A("fleet.warm", "w", "warm", "Warm", "Choose a recipe and warm it on the marked nodes, or the selected one",
      "Act", S.FLEET, footer=True, changes=True),
    A("fleet.open", "enter", "open", "Open", "Open the newest run of the selected node", "Look", S.FLEET,
      footer=True, available=_target),
    A("fleet.cancel", "x", "cancel", "Cancel", "Cancel the unfinished runs of the marked nodes, or the selected one",
      "Act", S.FLEET, footer=True, changes=True, dangerous=True, available=_unfinished),
    A("fleet.release", "R", "release", "Release", "Let go of the warm models of the marked nodes, or the selected one",
      "Act", S.FLEET, footer=True, changes=True, dangerous=True, available=_warm),
    A("fleet.park", "P", "park", "Park", "Take the standbys of the marked nodes, or the selected one, off their GPUs",
      "Act", S.FLEET, changes=True, dangerous=True, available=_standby),
    A("fleet.unpark", "U", "unpark", "Unpark", "Put the parked standbys of the marked nodes, or the selected one, back",
      "Act", S.FLEET, changes=True, dangerous=True, available=_parked),
    A("fleet.filter", "slash", "filter", "Filter", "Show only some nodes: a name, tag: state: recipe:, - for not",
      "Look", S.FLEET, footer=True),
    A("fleet.mark", "space", "mark", "Mark", "Mark or unmark the selected node", "Look", S.FLEET, footer=True,
      available=_target),
    A("fleet.mark_all", "a", "mark_all", "Mark all", "Mark every node shown, or unmark them", "Look", S.FLEET),
    A("fleet.unmark", "u", "unmark", "Unmark all", "Unmark every node, hidden ones too", "Look", S.FLEET),
    A("fleet.layout", "g", "layout", "Grid/list", "Switch between panels and one line a node", "Look", S.FLEET),
    A("fleet.sort", "s", "sort", "Sort", "Order nodes as configured, or what needs you first", "Look", S.FLEET),
    A("fleet.history", "h", "history", "History", "Every run there was, newest first", "Look", S.FLEET, footer=True),
    A("fleet.rollout", "o", "rollout", "Rollout", "The rollout under way, or the last one; starts one", "Look",
      S.FLEET, footer=True),
    A("fleet.probe", "b", "probe", "Probe", "Ask the marked nodes, or the selected one, for their hardware now",
      "Act", S.FLEET, available=_target),
    A("fleet.retry", "r", "retry", "Reconnect", "Try the link of the marked nodes, or the selected one, now",
      "Act", S.FLEET, available=_lost_link),
    _move("fleet.up", "up,k", "move('up')", "Select the node above"),
    _move("fleet.down", "down,j", "move('down')", "Select the node below"),
    _move("fleet.left", "left", "move('left')", "Select the node before"),
    _move("fleet.right", "right,l", "move('right')", "Select the node after"),
    _move("fleet.page_up", "pageup", "move('page_up')", "A page up"),
    _move("fleet.page_down", "pagedown", "move('page_down')", "A page down"),
    _move("fleet.home", "home", "move('home')", "Select the first node"),
    _move("fleet.end", "end,G", "move('end')", "Select the last node"),
    # Launch
    A("launch.start", "ctrl+s", "start", "Warm…", "Name the nodes once more, then start", "Act", S.LAUNCH,
      footer=True, changes=True),
    A("launch.all", "ctrl+a", "all_nodes", "All nodes", "Choose every node, or none", "Look", S.LAUNCH, footer=True),
    # Run
    A("run.cancel", "x", "cancel", "Cancel run", "Cancel this run", "Act", S.RUN, footer=True, changes=True,
      dangerous=True, available=_unfinished),
    A("run.release", "R", "release", "Release", "Let go of what this run holds warm", "Act", S.RUN, footer=True,
      changes=True, dangerous=True, available=_warm),
    A("run.details", "d", "details", "Details", "Show every figure that a stage reported", "Look", S.RUN, footer=True),
    A("run.log", "l", "log", "Log", "Show or hide the event log", "Look", S.RUN, footer=True, available=_log),
    # History
    A("history.open", "enter", "open", "Open", "Open the selected run", "Look", S.HISTORY, footer=True,
      available=_target),
    A("history.filter", "slash", "filter", "Filter", "Show only some runs: node: recipe: state: since:", "Look",
      S.HISTORY, footer=True),
    A("history.reload", "r", "reload", "Reload", "Read the newest runs again", "Look", S.HISTORY, footer=True),
    # Rollout
    A("rollout.resume", "c", "resume", "Resume", "Go on, here where nobody does; a gate is looked at anew", "Act",
      S.ROLLOUT, footer=True, changes=True, available=_verb("resume")),
    A("rollout.pause", "P", "hold", "Pause rollout", "Begin nothing more; what is under way goes on, and waits", "Act",
      S.ROLLOUT, footer=True, changes=True, available=_verb("pause")),
    A("rollout.promote", "m", "promote", "Promote", "Go on past a pause or what a gate says, naming it first", "Act",
      S.ROLLOUT, footer=True, changes=True, dangerous=True, available=_verb("promote")),
    A("rollout.retry", "r", "retry", "Retry", "Try the selected node once more", "Act", S.ROLLOUT, footer=True,
      changes=True, available=_verb("retry")),
    A("rollout.skip", "s", "skip", "Skip…", "Leave the selected node out, saying why", "Act", S.ROLLOUT, footer=True,
      changes=True, dangerous=True, available=_verb("skip")),
    A("rollout.abort", "x", "abort", "Abort", "End it: what is ready stays, what was drained is brought back", "Act",
      S.ROLLOUT, footer=True, changes=True, dangerous=True, available=_verb("abort")),
    A("rollout.start", "n", "start", "Start…", "Choose a rollout of fleet.toml, see its plan, and start it here", "Act",
      S.ROLLOUT, footer=True, changes=True, dangerous=True),
    A("rollout.promote_all", "M", "promote_all", "Promote all", "Go on past every later pause as well; past no gate",
      "Act", S.ROLLOUT, changes=True, dangerous=True, available=_verb("promote_all")),
    A("rollout.open", "enter", "open", "Open run", "Open the run of the selected node", "Look", S.ROLLOUT,
      footer=True, available=_target),
    A("rollout.list", "o", "list", "Others", "Look at another rollout of the history", "Look", S.ROLLOUT, footer=True),
    A("rollout.fold", "f", "fold", "Fold", "Fold nodes that are alike where a batch is long, or show each", "Look",
      S.ROLLOUT),
    A("rollout.log", "l", "log", "Timeline", "Show or hide the timeline", "Look", S.ROLLOUT, available=_log),
    *(
        _move(f"rollout.{way}", keys, f"move('{way}')", tooltip, S.ROLLOUT)
        for way, keys, tooltip in (
            ("up", "up,k", "Select the node above"),
            ("down", "down,j", "Select the node below"),
            ("left", "left", "To the batch before"),
            ("right", "right", "To the next batch"),
            ("page_up", "pageup", "A page up"),
            ("page_down", "pagedown", "A page down"),
            ("home", "home", "To the batch's first node"),
            ("end", "end,G", "To the batch's last node"),
        )
    ),
    # Dialogs
    A("dialog.yes", "y", "yes", "Yes", "Do it", "Answer", S.DIALOG, footer=True, palette=False),
    A("dialog.no", "n,escape", "no", "Go back", "Leave everything as it is", "Answer", S.DIALOG, footer=True,
      palette=False),
    A("dialog.next", "right,down,l,j", "app.focus_next", "Next", "The next button", "Answer", S.DIALOG, palette=False),
    A("dialog.previous", "left,up,k", "app.focus_previous", "Previous", "The button before", "Answer", S.DIALOG,
      palette=False),
    # Questions of a login
    A("prompt.decline", "escape", "decline", "Cancel", "Give no answer: the login fails, and asks again on reconnect",
      "Answer", S.PROMPT, footer=True, palette=False),
    A("prompt.decline_all", "ctrl+g", "decline_all", "Cancel all", "Give no answer to any question that waits",
      "Answer", S.PROMPT, footer=True, palette=False),
    # Everywhere
    A("app.back", "escape", "back", "Back", "Close what is open, step by step", "Console", S.APP),
    A("app.pause", "p", "pause", "Pause", "Hold the picture still; work on the hosts goes on", "Console", S.APP),
    A("app.help", "question_mark,f1", "help", "Help", "All keys", "Console", S.APP, footer=True),
    A("app.theme", "t", "change_theme", "Theme", "Choose another theme", "Console", S.APP),
    A("app.copy", "ctrl+c,super+c", "copy", "Copy", "Copy the selected text, or what is selected here", "Console",
      S.APP),
    A("app.quit", "ctrl+q", "quit", "Quit", "Leave the console; runs on hosts go on", "Console", S.APP,
      priority=True),
)  # fmt: skip
"""Order is that of the footer and of help."""

BY_ID: Mapping[str, Action] = {action.id: action for action in ACTIONS}


def bindings_of(scope: Scope) -> list[BindingType]:
    return [action.binding() for action in ACTIONS if action.scope is scope]


def actions_of(scope: Scope) -> tuple[Action, ...]:
    return tuple(action for action in ACTIONS if action.scope is scope)


def permitted(method: str, scope: Scope, situation: Situation, *, read_only: bool) -> bool | None:
    """Answer Textual's ``check_action``: False hides an action, None dims it, True lets it through.

    Where read-only mode is held for the operator; `ports.ReadOnlyFleet` holds it for everything else.
    """
    for action in ACTIONS:
        if action.scope is scope and action.method == method:
            if action.changes and read_only:
                return False
            return True if action.available(situation) else None
    return True


def unknown_ids(keymap: Mapping[str, str]) -> tuple[str, ...]:
    """Return what an operator's keymap names that is no action's id."""
    return tuple(sorted(set(keymap) - set(BY_ID)))
