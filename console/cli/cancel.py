"""``glowplug cancel``"""

from __future__ import annotations

import click

from console import report
from console.cli.choose import choose_runs
from console.cli.common import Context, emit, json_option, run_async
from console.fleet import Fleet
from remote_agent.protocol.messages import RunRecord


@click.command("cancel")
@click.argument("node")
@click.option("--run", "run_uid", help="The run, or how it begins.")
@click.option("--all", "everything", is_flag=True, help="Every unfinished run of the node.")
@json_option
@click.pass_obj
def command(context: Context, node: str, run_uid: str | None, everything: bool, as_json: bool) -> int:
    """End a run on NODE. Without --run or --all, the only one there is.

    A run that can't be ended (its process hangs in the driver) is told as stuck, exit code 1.

    Exit codes: 0 ended, 1 not ended, 2 no such run, 3 the node is out of reach.
    """
    config = context.load_config()
    name = config.node(node).name
    context.start_log()

    async def work() -> list[RunRecord]:
        async with context.fleet(config, [name]) as fleet:
            return await _cancel(fleet, name, run_uid, everything)

    ended = run_async(work())
    if as_json:
        emit({"runs": [report.document(report.of_view(name, run)) for run in ended]})
    else:
        for run in ended:
            click.echo(report.one_line(report.of_view(name, run)))
    return 0 if all(run.state.is_terminal and run.state.value != "stuck" for run in ended) else 1


async def _cancel(fleet: Fleet, node: str, run_uid: str | None, everything: bool) -> list[RunRecord]:
    runs = {run.run_uid: f"{run.recipe} {run.state.value}" for run in (await fleet.status(node)).runs}
    chosen = choose_runs(runs, run_uid, everything, f"nothing runs on {node}")
    return [await fleet.cancel_run(node, uid) for uid in chosen]
