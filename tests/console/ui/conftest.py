"""For all tests of screens: Textual's pilot waits for what is to be done, not for time to pass."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from textual._context import active_app
from textual.app import ScreenStackError
from textual.screen import Screen

ROUNDS_MAX = 50
"""So many frames may follow from each other; a screen that is never done is the test's to see."""


async def wait_for_idle(min_sleep: float = 0.0, max_sleep: float = 1.0) -> None:
    """Return when nothing is left to be done now: callbacks, messages, frames, and what those bring about.

    Textual's own takes the process for idle when it has used no time for a while, so it takes 20 ms each time and
    up to a second on a loaded machine; a key takes six of those.
    """
    for _ in range(ROUNDS_MAX):
        await _run_what_is_due()
        try:
            screen = active_app.get().screen
        except ScreenStackError:  # the app ends
            return
        if not _has_work(screen):
            return
        screen._on_timer_update()


async def _run_what_is_due() -> None:
    loop, idle_turns = asyncio.get_running_loop(), 0
    while idle_turns < 3:
        await asyncio.sleep(0)
        idle_turns = 0 if loop._ready else idle_turns + 1  # type: ignore[attr-defined]


def _has_work(screen: Screen[object]) -> bool:
    """Whether a screen would draw, or call back, when its timer comes."""
    is_out_of_date = screen._layout_required or screen._scroll_required or screen._repaint_required
    return bool(is_out_of_date or screen._recompose_required or screen._dirty_widgets or screen._callbacks)


@pytest.fixture(autouse=True, scope="package")
def _wait_for_what_is_to_be_done() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in ("app", "pilot"):
            patch.setattr(f"textual.{module}.wait_for_idle", wait_for_idle)
        yield
