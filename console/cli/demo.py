"""``glowplug demo``"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import click

from console import report
from console.cli.common import Context, FilePath, emit, ended_by_signals, json_option, run_async, say
from console.cli.follow import Following
from console.demo import RECIPE, DemoSettings, EmbeddedFleet


@click.command("demo")
@click.option("--headless", is_flag=True, help="Warm every node and end, without a screen.")
@json_option
@click.option("--model", type=FilePath(), help="A checkpoint of your own; else a small one is written.")
@click.option("--directory", type=FilePath(), help="Keep everything there; else in a temporary one.")
@click.option("--nodes", type=click.IntRange(1, 16), default=3, show_default=True, help="How many nodes.")
@click.option("--device", type=click.Choice(["auto", "cpu"]), default="auto", show_default=True)
@click.option("--python", help="A Python with torch, transformers and safetensors; this one by default.")
@click.option("--ascii", is_flag=True, help="Draw with ASCII alone.")
@click.pass_obj
def command(
    context: Context,
    headless: bool,
    as_json: bool,
    model: Path | None,
    directory: Path | None,
    nodes: int,
    device: str,
    python: str | None,
    ascii: bool,
) -> int:
    """Open the console on an embedded fleet: nodes on this machine, behind a real SSH server.

    Each node has its own agent and state directory, and warms a small Llama with
    random weights through every stage, on what this machine has. When it ends,
    nothing is left running, and nothing outside its directory.

    Exit codes of --headless: 0 all ready, 1 a run failed, 2 torch is missing (the
    'local' extra), 3 the SSH server ended, 130 interrupted.
    """
    if as_json and not headless:
        raise click.UsageError("--json goes with --headless")
    if python == "":
        raise click.BadParameter("it is empty", param_hint="'--python'")
    argv = (python or sys.executable,)
    if not headless:
        from console.cli.app import require_terminal

        require_terminal("--headless does not")
    settings = DemoSettings(nodes, model.absolute() if model else None, directory, device, argv)
    with ended_by_signals(), EmbeddedFleet(settings) as demo:
        own = Context(demo.locations, context.environ)
        own.start_log()
        if headless:
            return _warm_all(own, demo, as_json)
        from console.cli.app import show

        app_context = Context(demo.locations, context.environ)
        fleet = own.fleet(demo.config, parallel=nodes)
        return show(app_context, fleet, "embedded", ascii=ascii, runs_outlive=False, watch=demo.until_lost)


def _warm_all(context: Context, demo: EmbeddedFleet, as_json: bool) -> int:
    names = [node.name for node in demo.config.nodes]
    following = Following()

    async def work() -> bool:
        async with context.fleet(demo.config, names, parallel=len(names)) as fleet:
            warming = asyncio.ensure_future(following.warm(fleet, names, demo.config.recipe(RECIPE), wait=True))
            lost = asyncio.ensure_future(demo.until_lost())
            try:
                await asyncio.wait((warming, lost), return_when=asyncio.FIRST_COMPLETED)
                await (warming if warming.done() else lost)
            finally:
                for task in (warming, lost):
                    task.cancel()
                await asyncio.gather(warming, lost, return_exceptions=True)
            return await fleet.flush()

    say(f"warming {RECIPE} on {', '.join(names)} in {demo.directory}")
    is_stored = run_async(work(), lambda: "interrupted; the embedded fleet is ended")
    if not is_stored:
        say("the history could not be written in time")
    if as_json:
        emit({"runs": following.documents(), "errors": following.errors()})
    else:
        for outcome in following.outcomes.values():
            if outcome.run is not None:
                click.echo(report.one_line(report.of_view(outcome.node, outcome.run)))
    return following.exit_code
