"""What runs beside the drawing."""

from __future__ import annotations

import gc

from console.screens.workers import begin
from tests.console.ui.driving import running


async def test_what_is_ended_before_it_has_begun_leaves_nothing_that_nobody_awaits() -> None:
    """As when a console is left while its first reads are on their way: Python would warn of each."""
    begun = []

    async def work() -> None:
        begun.append("work")

    async with running() as (app, pilot):
        begin(app, work, "early").cancel()
        await pilot.pause()
        begin(app, work, "late")
        await pilot.pause()
    gc.collect()

    assert begun == ["work"]
