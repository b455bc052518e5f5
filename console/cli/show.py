"""``glowplug show``"""

from __future__ import annotations

import click

import db.errors
from console import report
from console.cli.common import Context, emit, json_option
from console.errors import HistoryError, UsageError
from db.queries import History, RunWithStages
from db.records import EventRow


@click.command("show")
@click.argument("run")
@json_option
@click.pass_obj
def command(context: Context, run: str, as_json: bool) -> int:
    """Show RUN (its uid, or how it begins) stage by stage, beside the ready run before it.

    The columns behind a stage's bar: its time, the time before, and the change.
    """
    found, before, events = _find(context, run)
    shown = report.of_rows(*found, events)
    previous = report.of_rows(*before) if before is not None else None
    if as_json:
        emit({"run": report.document(shown), "previous": report.document(previous) if previous else None})
    else:
        for line in report.waterfall(shown, previous):
            click.echo(line)
    return 0


def _find(context: Context, run_uid: str) -> tuple[RunWithStages, RunWithStages | None, tuple[EventRow, ...]]:
    try:
        with History(context.locations.history_file) as history:
            found = history.run(run_uid)
            if found is None:
                raise UsageError(f"no run {run_uid!r} in {context.locations.history_file}")
            uid = found[0].run_uid
            return found, history.previous_run(uid), history.events(uid)
    except (db.errors.AmbiguousRunError, db.errors.NoHistoryError) as error:
        raise UsageError(str(error)) from error
    except db.errors.HistoryError as error:
        raise HistoryError(str(error)) from error
