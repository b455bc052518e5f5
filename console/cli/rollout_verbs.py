"""``glowplug rollout start | status | pause | resume | promote | retry | skip | abort``"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import click

import db.errors
from console.clean import clean
from console.cli.ahead import Done, run_ahead
from console.cli.common import Context, current_actor, emit, json_option
from console.cli.rollout_foreground import Foreground, exit_code, opened_store
from console.config import Config
from console.errors import GlowplugError, HistoryError, UsageError
from console.rollout.idle import WITHOUT_CONTROLLER, apply_idle
from console.rollout.plan import Plan
from console.rollout.states import RolloutState
from console.rollout.status_text import one_line, row_document, status_document, status_lines
from console.schedules import Schedule
from db import rollouts
from db.errors import LeaseHeldError
from db.queries import History
from db.rollout_records import RolloutRecord, RolloutRow
from db.rollout_store import RolloutStore, lease_of

POLL_S = 0.1
ANSWER_S = 60.0

name_argument = click.argument("name")


def start_planned(context: Context, config: Config, planned: Plan, as_json: bool) -> int:
    """Carry a planned rollout out in the foreground."""
    context.start_log()
    with opened_store(context) as store:
        uid, state = Foreground(context, store).start(config, planned, config.recipe(planned.rollout.recipe))
    return _ended(context, uid, state, as_json)


def start_ahead(context: Context, config: Config, plan: Callable[[], Plan], schedule: Schedule, as_json: bool) -> int:
    """Carry a rollout out at each of its times, planned anew each time."""
    name = plan().rollout.name  # a mistake is told now
    foreground: Foreground | None = None

    async def due() -> Done:
        nonlocal foreground
        planned = plan()
        with opened_store(context) as store:
            foreground = Foreground(context, store)
            uid, state = await foreground.begin(config, planned, config.recipe(planned.rollout.recipe))
        record = _read(context, uid)
        if not as_json:
            click.echo(one_line(record.row, time.time_ns()))
        return Done(exit_code(state), status_document(record, time.time_ns()))

    def explain() -> str:
        return foreground.explain() if foreground is not None else f"interrupted; rollout {name} was not started"

    context.start_log()
    return run_ahead(schedule, due, explain, as_json)


@click.command("status")
@click.argument("name", required=False)
@json_option
@click.pass_obj
def status(context: Context, name: str | None, as_json: bool) -> int:
    """Show rollout NAME (or its uid): nodes, gates, what it waits for, its timeline. Without NAME, the newest ones.

    From this machine's history alone: no node is asked.

    Exit codes: 0 shown, 2 no such rollout.
    """
    now_ns = time.time_ns()
    if name is None:
        rows = _listed(context)
        if as_json:
            emit({"rollouts": [row_document(row) for row in rows]})
        for row in rows if not as_json else ():
            click.echo(one_line(row, now_ns))
        return 0
    record = _read(context, name)
    if as_json:
        emit(status_document(record, now_ns))
    else:
        for line in status_lines(record, now_ns):
            click.echo(clean(line, 2000))
    return 0


@click.command("pause")
@name_argument
@json_option
@click.pass_obj
def pause(context: Context, name: str, as_json: bool) -> int:
    """Begin nothing more of rollout NAME; what is under way goes on, and waits.

    Exit codes: 0 paused, 1 refused, 2 no such rollout.
    """
    return _ask(context, name, "pause", {}, as_json)


@click.command("resume")
@name_argument
@json_option
@click.pass_obj
def resume(context: Context, name: str, as_json: bool) -> int:
    """Go on with rollout NAME; an inconclusive gate is looked at anew, and no failed one is passed.

    Where nobody carries the rollout out, this does, once it has read from the nodes what became of them.

    Exit codes: 0 it goes on (or: carried out, all ready), 1 refused, or a node failed, 2 no such rollout, or another
    process has it, 4 aborted, 130 interrupted.
    """
    return _ask(context, name, "resume", {}, as_json)


@click.command("promote")
@name_argument
@click.option("--all", "everything", is_flag=True, help="Past every later pause as well; past no gate.")
@json_option
@click.pass_obj
def promote(context: Context, name: str, everything: bool, as_json: bool) -> int:
    """Go on with rollout NAME past a pause, an inconclusive gate, or without what failed at one.

    Where nobody carries the rollout out, this does, as resume.

    Exit codes: as resume.
    """
    return _ask(context, name, "promote", {"everything": everything}, as_json)


@click.command("retry")
@name_argument
@click.argument("node")
@json_option
@click.pass_obj
def retry(context: Context, name: str, node: str, as_json: bool) -> int:
    """Try NODE of rollout NAME once more: a new attempt, and a new analysis. A paused rollout stays paused.

    Where nobody carries the rollout out, this does, as resume.

    Exit codes: as resume.
    """
    return _ask(context, name, "retry", {"node": node}, as_json)


@click.command("skip")
@name_argument
@click.argument("node")
@click.option("--reason", required=True, help="Why it is left out; it is kept.")
@json_option
@click.pass_obj
def skip(context: Context, name: str, node: str, reason: str, as_json: bool) -> int:
    """Leave NODE out of rollout NAME. One that was taken out of traffic is backed out.

    Exit codes: 0 skipped, 1 refused, 2 no such rollout, or no reason; further as resume, where something is to be
    done and nobody carries the rollout out.
    """
    if not reason.strip():
        raise UsageError("--reason: say why the node is left out")
    return _ask(context, name, "skip", {"node": node, "reason": reason}, as_json)


@click.command("abort")
@name_argument
@json_option
@click.pass_obj
def abort(context: Context, name: str, as_json: bool) -> int:
    """End rollout NAME: nothing more is begun, what is ready stays, what was taken out of traffic is backed out.

    Where nobody carries the rollout out, this does, to its end.

    Exit codes: 0 it aborts (or: is aborted), 1 refused, 2 no such rollout, or another process has it, 130 interrupted.
    """
    return _ask(context, name, "abort", {}, as_json)


def _ask(context: Context, name: str, verb: str, arguments: Mapping[str, object], as_json: bool) -> int:
    """Ask the rollout's controller, or be it; where another verb becomes it at the same moment, that one is asked."""
    context.start_log()
    while True:
        row = _read(context, name).row
        if row.finished_ns is not None:
            raise UsageError(f"rollout {row.name} is over: {row.phase}{': ' if row.reason else ''}{row.reason}")
        with opened_store(context) as store:
            try:
                return _ask_once(context, store, row, verb, arguments, as_json)
            except LeaseHeldError:  # somebody was between our look and our take
                continue


def _ask_once(
    context: Context, store: RolloutStore, row: RolloutRow, verb: str, arguments: Mapping[str, object], as_json: bool
) -> int:
    """Raises: LeaseHeldError where another has become the controller meanwhile; nothing was asked of it then"""
    actor = current_actor()
    ident = store.ask(row.rollout_uid, (actor.user, actor.host), verb, arguments)
    if ident is not None:
        return _told(context, row, verb, _until_answered(context, store, row, ident), as_json)
    if verb in WITHOUT_CONTROLLER:
        answer = apply_idle(store, row.rollout_uid, verb, arguments, f"{actor.user}@{actor.host}")
        if answer is not None:
            return _told(context, row, verb, answer, as_json)
    state = Foreground(context, store).take_over(row, verb, arguments)
    code = _ended(context, row.rollout_uid, state, as_json)
    return 0 if verb == "abort" and code == 4 else code


def _until_answered(context: Context, store: RolloutStore, row: RolloutRow, ident: int) -> tuple[bool, str]:
    """Wait for the controller's answer. Raises: GlowplugError once it is not to be expected any more."""
    late_s = time.monotonic() + ANSWER_S
    with History(context.locations.history_file) as history:
        while True:
            answer = rollouts.command(history, ident)
            if answer is not None and answer.answer is not None:
                return bool(answer.is_done), answer.answer
            record = rollouts.read(history, row.rollout_uid, after_entry=2**62)
            is_gone = record is None or lease_of(record.row, time.time_ns()) is None
            if (is_gone or time.monotonic() > late_s) and store.withdraw(ident):
                what = "has ended" if is_gone else f"did not answer within {ANSWER_S:g} s"
                raise GlowplugError(f"the controller of rollout {row.name} {what}; nothing was done, say it again")
            time.sleep(POLL_S)


def _told(context: Context, row: RolloutRow, verb: str, answer: tuple[bool, str], as_json: bool) -> int:
    done, text = answer
    if as_json:
        emit({**row_document(_read(context, row.rollout_uid).row), "verb": verb, "done": done, "answer": text})
    else:
        click.echo(clean(f"{verb} {row.name}: {text}", 1000))
    return 0 if done else 1


def _ended(context: Context, uid: str, state: RolloutState, as_json: bool) -> int:
    record = _read(context, uid)
    if as_json:
        emit(status_document(record, time.time_ns()))
    else:
        click.echo(one_line(record.row, time.time_ns()))
    return exit_code(state)


def _read(context: Context, name: str) -> RolloutRecord:
    try:
        with History(context.locations.history_file) as history:
            record = rollouts.read(history, name)
    except db.errors.NoHistoryError:
        record = None
    except db.errors.HistoryError as error:
        raise HistoryError(str(error)) from error
    if record is None:
        raise UsageError(f"no rollout {clean(name, 80)!r} was ever started here")
    return record


def _listed(context: Context) -> tuple[RolloutRow, ...]:
    try:
        with History(context.locations.history_file) as history:
            return rollouts.listed(history)
    except db.errors.NoHistoryError:
        return ()
    except db.errors.HistoryError as error:
        raise HistoryError(str(error)) from error
