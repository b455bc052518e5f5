"""Starts the app over a fake fleet at a frozen moment, and waits for what is to be seen."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from datetime import UTC
from typing import Any

from textual.pilot import Pilot

from console.app import GlowplugApp
from console.screens.fleet import FleetScreen
from console.screens.ports import ReadOnlyFleet
from console.state import NodeState
from console.widgets.line_view import LineView
from console.widgets.paint import plain
from tests.console.ui import scenes
from tests.console.ui.fake_fleet import FakeFleet
from tests.console.ui.fake_rollouts import FakeRollouts

DEADLINE_S = 30.0


def make_app(states: Iterable[NodeState] | None = None, **options: Any) -> GlowplugApp:
    """Return an app that has not been started; its clocks stand still."""
    fleet = FakeFleet(scenes.fleet() if states is None else states)
    options = {"title": "eu-prod", "zone": UTC, **options}
    rollouts = options.pop("rollouts", None) or FakeRollouts()
    return GlowplugApp(
        fleet, rollouts, clock_ns=lambda: scenes.NOW_MONO_NS, wall_clock_ns=lambda: scenes.NOW_WALL_NS, **options
    )


def fake(app: GlowplugApp) -> FakeFleet:
    fleet = app.fleet._fleet if isinstance(app.fleet, ReadOnlyFleet) else app.fleet
    assert isinstance(fleet, FakeFleet)
    return fleet


@asynccontextmanager
async def running(
    states: Iterable[NodeState] | None = None, *, size: tuple[int, int] = (120, 40), **options: Any
) -> AsyncIterator[tuple[GlowplugApp, Pilot[int]]]:
    """A running app, its first frame drawn."""
    app = make_app(states, **options)
    async with app.run_test(size=size, notifications=True) as pilot:
        await settle(app, pilot)
        yield app, pilot


async def settle(app: GlowplugApp, pilot: Pilot[int]) -> None:
    """Let workers end, also those that keys still under way begin, and draw one frame of what came of it."""
    for _ in range(2):
        await pilot.pause()
        await app.workers.wait_for_complete()
    app.frame()
    await pilot.pause()
    await pilot.pause()


async def press(app: GlowplugApp, pilot: Pilot[int], *keys: str) -> None:
    """Press the keys one after the other and let everything settle."""
    await pilot.press(*keys)
    await settle(app, pilot)


async def until(condition: Callable[[], bool], pilot: Pilot[int]) -> None:
    """Wait until ``condition`` holds; fail after a deadline."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await pilot.pause(0.01)


async def see(text: str, app: GlowplugApp, pilot: Pilot[int]) -> None:
    """Wait until ``text`` is on screen."""
    await until(lambda: text in shown(app), pilot)


def fleet_screen(app: GlowplugApp) -> FleetScreen:
    screen = app.screen_stack[0]
    assert isinstance(screen, FleetScreen)
    return screen


def shown_lines(app: GlowplugApp) -> list[str]:
    """Return what the top screen shows, line by line, as a terminal would."""
    return ["".join(segment.text for segment in line) for line in app.screen._compositor.render_strips()]


def shown(app: GlowplugApp) -> str:
    return "\n".join(shown_lines(app))


def lines_of(app: GlowplugApp, selector: str) -> list[str]:
    """Return the text of one `LineView` of the top screen."""
    return [plain(line) for line in app.screen.query_one(selector, LineView).lines]
