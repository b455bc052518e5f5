"""``glowplug history``"""

from __future__ import annotations

import datetime
import re
import sys
import time

import click

import db.errors
from console import report
from console.clean import clean
from console.cli.common import Context, emit, json_option, say
from console.errors import HistoryError
from db.export import write_runs_csv
from db.queries import History, RunWithStages
from db.records import RunFilter
from remote_agent.protocol.messages import RunState

_SPAN = re.compile(r"(\d{1,6})([smhdw])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def _since(_: click.Context, __: click.Parameter, text: str | None) -> int | None:
    """Turn ``7d``, ``12h`` or a date into nanoseconds of Unix time."""
    if text is None:
        return None
    match = _SPAN.fullmatch(text)
    if match:
        return max(0, time.time_ns() - int(match[1]) * _SECONDS[match[2]] * 10**9)
    try:
        moment_s = datetime.datetime.fromisoformat(text).astimezone().timestamp()
        return min(int(moment_s * 10**9), 2**63 - 1)
    except (ValueError, OverflowError, OSError):
        raise click.BadParameter(f"{text!r} is neither a span like 7d, 12h, 30m nor a date like 2025-11-29") from None


@click.command("history")
@click.option("--node", help="Runs of this node only.")
@click.option("--recipe", help="Runs of this recipe only.")
@click.option("--status", type=click.Choice([state.value for state in RunState]), help="Runs that ended so only.")
@click.option("--since", callback=_since, metavar="SPAN", help="Since then: 7d, 12h, 30m, or a date.")
@click.option("--limit", type=click.IntRange(1, 100_000), default=50, show_default=True, help="So many runs at most.")
@click.option("--csv", "as_csv", is_flag=True, help="CSV on stdout.")
@json_option
@click.pass_obj
def command(
    context: Context,
    node: str | None,
    recipe: str | None,
    status: str | None,
    since: int | None,
    limit: int,
    as_csv: bool,
    as_json: bool,
) -> int:
    """List runs, newest first, from this machine's history. Asks no node."""
    if as_csv and as_json:
        raise click.UsageError("give --csv or --json, not both")
    entries = _entries(context, RunFilter(node, recipe, status, since, limit=limit))
    if as_json:
        emit({"runs": [report.document(report.of_rows(run, stages)) for run, stages in entries]})
    elif as_csv:
        write_runs_csv((run for run, _ in entries), sys.stdout, clean)
    else:
        if not entries:
            say("no run fits")
        for run, stages in entries:
            click.echo(report.history_line(report.of_rows(run, stages)))
    return 0


def _entries(context: Context, wanted: RunFilter) -> tuple[RunWithStages, ...]:
    """Return what fits; nothing where nothing was ever recorded."""
    try:
        with History(context.locations.history_file) as history:
            return history.runs_with_stages(wanted)
    except db.errors.NoHistoryError:
        return ()
    except db.errors.HistoryError as error:
        raise HistoryError(str(error)) from error
