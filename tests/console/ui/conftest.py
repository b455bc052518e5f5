"""For all tests of screens: Textual's pilot waits for what is to be done, not for time to pass."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest


async def wait_for_idle(min_sleep: float = 0.0, max_sleep: float = 1.0) -> None:
    """Return when nothing is left that could be done now: callbacks that are due, messages on their way.

    Textual's own takes the process for idle when it has used no time for a while, so it takes 20 ms each time and
    up to a second on a loaded machine; a key takes six of those.
    """
    loop = asyncio.get_running_loop()
    idle_turns = 0
    while idle_turns < 3:
        await asyncio.sleep(0)
        idle_turns = 0 if loop._ready else idle_turns + 1  # type: ignore[attr-defined]


@pytest.fixture(autouse=True, scope="package")
def _wait_for_what_is_to_be_done() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in ("app", "pilot"):
            patch.setattr(f"textual.{module}.wait_for_idle", wait_for_idle)
        yield
