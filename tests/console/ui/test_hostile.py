"""Hostile text in every place that text can come from: nothing raw reaches the terminal, nothing crashes.

The states here were never cleaned, so that the widgets' own boundary is what is tested.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Mapping
from typing import Any, TypeVar, cast

import pytest
from textual.drivers.headless_driver import HeadlessDriver
from textual.pilot import Pilot

from console.app import GlowplugApp
from console.errors import RequestRefused
from console.prompts import Field, Prompt
from console.rollout.others import Other
from console.screens.fleet import FleetScreen
from console.screens.history import HistoryScreen
from console.screens.launch import LaunchScreen
from console.screens.prompt import PromptScreen
from console.screens.rollout import RolloutScreen
from console.screens.run import RunScreen
from console.state import NodeState
from console.widgets.glyphs import ASCII, TEXT_LIMIT, UNICODE
from remote_agent.protocol.messages import ModelSource, Recipe
from tests.console.ui import rollout_scenes, scenes
from tests.console.ui.asking import asking
from tests.console.ui.driving import fake, make_app, press, settle, until
from tests.console.ui.fake_fleet import FakeFleet, FakeHistory, run_row, stage_rows
from tests.console.ui.fake_rollouts import FakeRollouts

T = TypeVar("T")

PAYLOADS = {
    "clear screen": "a\x1b[2Jb",
    "clipboard": "\x1b]52;c;aGVsbG8=\x07x",
    "title": "\x1b]0;owned\x1b\\x",
    "device control": "\x1bP1$r0m\x1b\\x",
    "8-bit csi": "a\x9b2Jb",
    "8-bit osc": "\x9d52;c;aGVsbG8=\x9cx",
    "unfinished": "\x1b]52;c;aGVsbG8=",
    "controls": "a\x00\x07\x08\x0b\x0c\x0e\x7f\r\nb\tc",
    "bidi": "user\u202enimda\u202c \u2066x\u2069",
    "zero width": "a\u200b\u200d\ufeffb\ufe0f",
    "markup closing": "[/nope]",
    "markup action": "[@click=app.quit]x[/]",
    "markup style": "[red on blue]x[bold",
    "wide": "漢字かな" * 40 + "👩‍👩‍👧‍👦🇩🇪" * 20,
    "combining": "e" + "\u0301" * 300,
    "long": "x" * 100_000,
    "surrogate": "a\ud800b",
    "line breaks": "a\nb\u2028c\x85d",
}

GROUPS = {
    "sequences": [
        "clear screen", "clipboard", "title", "device control", "8-bit csi", "8-bit osc", "controls", "bidi",
        "zero width", "surrogate", "line breaks",
    ],
    "markup closing": ["markup closing"],
    "markup": ["markup action", "markup style"],
    "wide": ["wide"],
    "combining": ["combining"],
    "long": ["long"],
    "unfinished": ["unfinished"],
}  # fmt: skip
"""Payloads that end by themselves are tried together; one that swallows or crashes alone."""

ALLOWED = re.compile(r"\x1b\[[0-9;]*[mH]|\x1b\[\?2026[hl]|\x1b\[\?25[hl]|\x1b\]22;[a-z-]*\x07")
"""What Textual itself writes while it draws: colours, cursor moves, synchronised output, the pointer's shape."""
FORBIDDEN = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")


class RecordingDriver(HeadlessDriver):
    """Claims to be a terminal and keeps what is written to it."""

    written: list[str]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.written = []

    @property
    def is_headless(self) -> bool:
        return False

    def write(self, data: str) -> None:
        self.written.append(data)


def poisoned(value: T, payload: str) -> T:
    """Return ``value`` with the payload in every free text in it, names of things kept apart by a number."""
    return cast(T, _poison(value, payload))


def _poison(value: object, payload: str) -> object:
    if isinstance(value, enum.Enum):
        return value
    if isinstance(value, str):
        return value if value in _FIXED else f"{payload}{value[-5:]}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = {field.name: _poison(getattr(value, field.name), payload) for field in dataclasses.fields(value)}
        copy = object.__new__(type(value))
        for name, new in changed.items():
            object.__setattr__(copy, name, new)
        return copy
    if isinstance(value, Mapping):
        return {_poison(key, payload): _poison(item, payload) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_poison(item, payload) for item in value)
    return value


_FIXED = frozenset(["nvml", "absent", "bytes", "info", "warning", "error"])


def hostile_fleet(payload: str) -> FakeFleet:
    states = tuple(cast(NodeState, poisoned(state, payload)) for state in scenes.fleet())
    rows = [
        (poisoned(run_row("7f3a12cd0001", "gpu-eu-01", 1), payload), poisoned(stage_rows(), payload)),
        (poisoned(run_row("bb0000000009", "gpu-eu-02", 5, state="failed", failure_code="x"), payload), ()),
        (run_row("cc0000000001", payload, 9, state=payload, failure_detail=payload, failure_code=payload), ()),
    ]
    fleet = FakeFleet(states, FakeHistory(rows))
    fleet.notices = (payload,)
    fleet.config.recipes = {payload: Recipe("llama-7b", ModelSource(f"/{payload}".replace("\0", "")))}
    for state in states:
        fleet.refuse[state.name] = RequestRefused("busy", payload)
    return fleet


@pytest.mark.parametrize(("group", "ascii_only"), [*((group, False) for group in GROUPS), ("sequences", True)])
async def test_nothing_raw_reaches_the_terminal_from_any_screen(group: str, ascii_only: bool) -> None:
    """Panels, rows, dialogs, tables, lists, notices and palette; no text becomes an action, what is copied is clean."""
    payload = "".join(PAYLOADS[name] for name in GROUPS[group])
    fields = (Field(payload), Field(payload, is_secret=False, is_theirs=True))
    prompts = asking(Prompt(payload, (payload,), (payload,), fields, payload))
    app = make_app((), title=payload, ascii=ascii_only, prompts=prompts)
    app.fleet = hostile_fleet(payload)
    app.rollouts = rollouts = FakeRollouts([rollout_scenes.hostile(payload)])
    rollouts.unfinished = (Other(rollout_scenes.UID, payload, payload, payload, 1),)
    app.driver_class = RecordingDriver
    visited = Visit(app)

    result = await app.run_async(headless=False, size=(120, 40), auto_pilot=visited.run)

    assert visited.problem is None, visited.problem
    assert result == 7, "the app ended by itself"
    assert len(visited.written) > 10_000
    left = ALLOWED.sub("", visited.written)
    odd = {(match.group(), left[max(0, match.start() - 20) : match.end() + 20]) for match in FORBIDDEN.finditer(left)}
    assert not odd, sorted(odd)[:3]
    assert not visited.actions
    assert not FORBIDDEN.search(visited.copied)
    if ascii_only:
        assert {character for character in left if not character.isascii()} == set()


class Visit:
    """Goes to every screen; keeps what was written, what could be clicked, and what copying gave."""

    def __init__(self, app: GlowplugApp) -> None:
        self._app = app
        self.written = ""
        self.copied = ""
        self.actions: list[object] = []
        self.problem: BaseException | None = None

    async def run(self, pilot: Pilot[int]) -> None:
        try:
            await self._visit(pilot)
            driver = self._app._driver
            assert isinstance(driver, RecordingDriver)
            self.written = "".join(driver.written)
            await press(self._app, pilot, "ctrl+c")
            self.copied += self._app.clipboard
        except BaseException as problem:
            self.problem = problem
            raise
        finally:
            self._app.exit(7)

    async def _press(self, pilot: Pilot[int], *keys: str) -> None:
        await press(self._app, pilot, *keys)
        self._collect()

    def _collect(self) -> None:
        self.actions += [
            segment.style.meta
            for strip in self._app.screen._compositor.render_strips()
            for segment in strip
            if segment.style and "@click" in segment.style.meta
        ]

    async def _visit(self, pilot: Pilot[int]) -> None:
        app, fleet = self._app, fake(self._app)
        await settle(app, pilot)
        assert isinstance(app.screen, PromptScreen)
        self._collect()
        await self._press(pilot, "escape", "g", "j")
        await self._press(pilot, "g", "s", "a", "x")
        await self._press(pilot, "y")
        await until(lambda: any(asked.what == "cancel" for asked in fleet.asked), pilot)
        await self._press(pilot, "R", "y")
        app.clear_notifications()
        await self._runs(pilot)
        app.push_screen(HistoryScreen())
        await self._press(pilot, "down", "down")
        await self._press(pilot, "enter", "escape", "escape")
        await self._rollout(pilot)
        app.push_screen(LaunchScreen(fleet.nodes[:2]))
        await self._press(pilot, "enter")
        await self._press(pilot, "y")
        await until(lambda: any(asked.what == "warm" for asked in fleet.asked), pilot)
        await self._press(pilot, "escape", "ctrl+p", *"go to")
        await self._press(pilot, "escape", "question_mark", "escape")
        assert isinstance(app.screen, FleetScreen)

    async def _rollout(self, pilot: Pilot[int]) -> None:
        """Cells, reasons, gates, the timeline; dialogs that name nodes; the answer to a verb."""
        app = self._app
        rollouts = app.rollouts
        assert isinstance(rollouts, FakeRollouts)
        view = rollouts.views[0]
        rollouts.answer = (True, view.row.name)
        rollouts.names = (view.row.name,)
        app.push_screen(RolloutScreen())
        await self._press(pilot, "down", "down")
        assert isinstance(app.screen, RolloutScreen)
        assert app.screen.view is not None
        await self._press(pilot, "s", "escape", "n")
        await self._press(pilot, "escape", "o")
        await self._press(pilot, "escape", "x")
        await self._press(pilot, "y")
        await until(lambda: bool(rollouts.asked), pilot)
        app.clear_notifications()
        self.copied += app.screen.copied_text() or ""
        await self._press(pilot, "escape")

    async def _runs(self, pilot: Pilot[int]) -> None:
        fleet = fake(self._app)
        for name in (fleet.nodes[0], fleet.nodes[2], fleet.nodes[5]):
            run_uid = fleet.state(name).latest_run
            assert run_uid is not None
            self._app.push_screen(RunScreen(name, run_uid))
            await self._press(pilot, "d")
            await self._press(pilot, "escape")


@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS.keys())
def test_the_one_way_out_lets_nothing_through(payload: str) -> None:
    """Every line, cell, prompt and notice goes through it; once more makes no difference."""
    for glyphs in (UNICODE, ASCII):
        text = glyphs.text(f"before {payload} after")

        assert not FORBIDDEN.search(text)
        assert "\n" not in text
        assert len(text) <= TEXT_LIMIT
        assert text.isascii() or not glyphs.ascii_only
        assert glyphs.text(text) == text


async def test_the_leaving_words_are_clean(capsys: pytest.CaptureFixture[str]) -> None:
    """They are printed to the terminal after the app has gone."""
    payload = "\x1b]52;c;aGVsbG8=\x07\x1b[2J[/nope]\u202e"
    async with (app := make_app((), title=payload)).run_test(size=(80, 24)) as pilot:
        app.fleet = hostile_fleet(payload)
        await app.run_action("quit")
        await pilot.pause()
        message = str(app._exit_renderables[0])

    assert not FORBIDDEN.search(message)


def test_the_test_would_see_what_it_looks_for() -> None:
    """Each payload that is dangerous is caught when it is written as it is; the others are for crashes."""
    harmless = {"markup closing", "markup action", "markup style", "combining", "long"}
    for name, payload in PAYLOADS.items():
        assert bool(FORBIDDEN.search(ALLOWED.sub("", payload))) is (name not in harmless), name
