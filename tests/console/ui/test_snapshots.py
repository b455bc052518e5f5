"""Pictures of every screen at one frozen moment; a change of looks is seen before it is merged.

``pytest tests/console/ui/test_snapshots.py --snapshot-update`` takes them anew.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import pytest
from textual.pilot import Pilot

from console.app import GlowplugApp
from console.screens.run import RunScreen
from tests.console.ui import rollout_scenes
from tests.console.ui.asking import FACTORS, HOST_KEY, PASSWORD, STOP, asking
from tests.console.ui.driving import make_app, press, settle, until
from tests.console.ui.fake_rollouts import FakeRollouts

pytestmark = pytest.mark.skipif(
    sys.version_info[:2] != (3, 11) and "CI" not in os.environ,
    reason="pictures are compared on one pinned Python, 3.11; and in CI on whichever it has",
)

PICTURES = {
    "fleet dark": ((120, 40), (), {}),
    "fleet light": ((120, 40), (), {"theme": "glowplug-light"}),
    "fleet 80x24": ((80, 24), (), {}),
    "fleet 40x12": ((40, 12), (), {}),
    "fleet list": ((160, 24), ("g", "down", "space"), {}),
    "fleet ascii": ((80, 24), (), {"ascii": True}),
    "fleet paused and filtered": ((120, 24), ("slash", *"tag:eu -state:cold", "enter", "p"), {}),
    "launch": ((120, 40), ("w",), {}),
    "launch 40x12": ((40, 12), ("w",), {}),
    "confirm": ((120, 40), ("right", "space", "right", "right", "space", "x"), {}),
    "run live": ((120, 36), ("right", "enter"), {}),
    "run ready": ((120, 36), ("enter", "d"), {}),
    "run failed 80x24": ((80, 24), ("right", "right", "enter"), {}),
    "run 40x12": ((40, 12), ("enter",), {}),
    "history": ((120, 36), ("h",), {}),
    "history light": ((120, 36), ("h",), {"theme": "glowplug-light"}),
    "prompt": ((100, 24), (), {"prompts": asking(PASSWORD, HOST_KEY)}),
    "prompt 40x12": ((40, 12), (), {"prompts": asking(HOST_KEY, PASSWORD)}),
    "prompt ascii": ((80, 24), (), {"prompts": asking(FACTORS), "ascii": True}),
    "prompt stopped": ((80, 24), (), {"prompts": asking(STOP)}),
    "rollout": ((120, 40), ("o", "down"), {}),
    "rollout light": ((120, 40), ("o",), {"theme": "glowplug-light"}),
    "rollout paused 80x24 ascii": ((80, 24), ("o",), {"ascii": True}),
    "rollout 40x12": ((40, 12), ("o", "down"), {}),
    "rollout of 300": ((120, 40), ("o", *["pagedown"] * 4), {}),
    "help": ((120, 40), ("question_mark",), {}),
}


ROLLOUTS = {
    "rollout paused 80x24 ascii": rollout_scenes.paused,
    "rollout of 300": lambda: rollout_scenes.view(rollout_scenes.long(), timeline=rollout_scenes.long_timeline(20)),
}
"""What is shown where it is not the rollout with a bit of everything."""


@pytest.mark.parametrize("name", PICTURES)
def test_the_screen_looks_as_it_did(name: str, snap_compare: Callable[..., bool]) -> None:
    """Glyphs, words, colours, places."""
    size, keys, options = PICTURES[name]
    rollouts = FakeRollouts([ROLLOUTS.get(name, rollout_scenes.view)()])
    app: GlowplugApp = make_app(rollouts=rollouts, **options)

    async def before(pilot: Pilot[int]) -> None:
        await settle(app, pilot)
        await press(app, pilot, *keys)
        screen = app.screen
        if isinstance(screen, RunScreen):
            await until(lambda: screen.detail is not None and screen.has_log, pilot)
        await settle(app, pilot)

    assert snap_compare(app, run_before=before, terminal_size=size)
