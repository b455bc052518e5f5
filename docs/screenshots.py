"""Takes the pictures in ``docs/images`` from the app over a real embedded fleet: ``python docs/screenshots.py``.

Needs Debian's librsvg2-bin and fonts-firacode, the font that the pictures are laid out for.
Each node really warms the demo's model on this machine, so figures differ from run to run.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

from textual.pilot import Pilot

from console.app import GlowplugApp
from console.demo import RECIPE, ROLLOUT, DemoSettings, EmbeddedFleet
from console.fleet import Fleet
from console.links import real_links
from console.rollout.carrying import Carrier, carrier_of
from console.rollout.states import Phase, RolloutState
from console.screens.rollout import RolloutScreen
from console.screens.run import RunScreen
from console.state import NodeState
from console.transports.gate import Gate
from remote_agent.protocol.messages import Actor

IMAGES = Path(__file__).parent / "images"
NODES = 6
FLEET_SIZE, RUN_SIZE, ROLLOUT_SIZE = (120, 18), (120, 30), (120, 30)
DEADLINE_S = 180.0
POLL_S = 0.02
WIDTH_PX = 1600


async def take(demo: EmbeddedFleet) -> None:
    """Warm most nodes, let some go, start one again; write the fleet in mid-flight and that run once it is ready."""
    locations = demo.locations
    actor, links = Actor("operator", "workstation"), real_links(Gate.create(locations, os.environ))
    fleet = Fleet(demo.config, locations.history_file, parallel=3, actor=actor, links=links)
    rollouts = carrier_of(fleet, locations.history_file, actor, os.environ)
    app = GlowplugApp(fleet, rollouts, title="embedded", runs_outlive=False)
    async with app.run_test(size=FLEET_SIZE) as pilot:
        for name in fleet.nodes:
            await until(lambda name=name: fleet.state(name).is_known, pilot)
        first, second, third, fourth, fifth, _ = fleet.nodes
        for name in (first, second, third, fourth, fifth, *(first, second, third, fifth) * 4):
            await fleet.release(name)
            await warm(fleet, name, pilot)
        await fleet.release(second)
        await fleet.release(fifth)
        run_uid = await fleet.warm(second, RECIPE)
        await until(lambda: is_well_under_way(fleet.state(second)), pilot)
        save(app, "fleet.png")

        await fleet.wait(second, run_uid, DEADLINE_S)
        await fleet.flush()
        await pilot.resize_terminal(*RUN_SIZE)
        screen = RunScreen(second, run_uid)
        app.push_screen(screen)
        await until(lambda: screen.detail is not None and screen.has_log, pilot)
        await app.workers.wait_for_complete()
        await pilot.pause()
        save(app, "run.png")

        app.go_to(first)
        await take_rollout(app, rollouts, pilot)


async def take_rollout(app: GlowplugApp, rollouts: Carrier, pilot: Pilot[int]) -> None:
    """Carry out the demo's rollout past its pause; write it while the second wave of its second batch is warm."""
    for name in app.fleet.nodes:
        await app.fleet.release(name)
    await pilot.resize_terminal(*ROLLOUT_SIZE)
    uid = await rollouts.start(await rollouts.plan(ROLLOUT))
    screen = RolloutScreen(uid)
    app.push_screen(screen)
    await until(lambda: rollouts.carried[ROLLOUT].phase is Phase.PAUSED, pilot)
    await rollouts.ask(uid, "resume", {})
    await until(lambda: is_in_its_second_wave(rollouts.carried[ROLLOUT]), pilot)
    await until(lambda: screen.view is not None and is_in_its_second_wave(screen.view.state), pilot)
    app.clear_notifications()
    await pilot.pause()
    save(app, "rollout.png")
    await rollouts.close()


def is_in_its_second_wave(state: RolloutState) -> bool:
    """Whether some nodes of its second batch are ready, and others have been looked at once."""
    ready = [node for node in state.nodes if node.state.value == "ready"]
    return len(ready) >= 3 and state.analysis is not None and any(gate.taken for gate in state.analysis.gates)


async def warm(fleet: Fleet, name: str, pilot: Pilot[int]) -> None:
    run_uid = await fleet.warm(name, RECIPE)
    await fleet.wait(name, run_uid, DEADLINE_S)
    await until(lambda: bool(fleet.state(name).residents), pilot)


def is_well_under_way(state: NodeState) -> bool:
    """Whether enough stages are over for the picture to show some, and one runs."""
    run = state.run
    return run is not None and run.current_stage is not None and run.current_stage.name in ("compile", "first_request")


async def until(condition: Callable[[], bool], pilot: Pilot[int]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await pilot.pause(POLL_S)


def save(app: GlowplugApp, name: str) -> None:
    app.frame()
    picture = app.export_screenshot(title="glowplug").replace("<svg ", '<svg xml:space="preserve" ', 1)
    command = ["rsvg-convert", "--width", str(WIDTH_PX), "--output", str(IMAGES / name)]
    subprocess.run(command, input=picture, text=True, check=True)


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    with EmbeddedFleet(DemoSettings(nodes=NODES)) as demo:
        asyncio.run(take(demo))


if __name__ == "__main__":
    main()
