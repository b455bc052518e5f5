"""``glowplug rollout start | status | pause | resume | promote | retry | skip | abort``"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import click

import db.errors
from console.clean import clean
from console.cli.ahead import Done, run_ahead
from console.cli.common import Context, emit, json_option
from console.cli.rollout_foreground import Foreground, exit_code, opened_store
from console.config import Config
from console.errors import HistoryError, UsageError
from console.rollout.plan import Plan
from console.rollout.reaching import Answer, over
from console.rollout.states import RolloutState
from console.rollout.status_text import enough_lines, one_line, row_document, status_document, status_lines
from console.schedules import Schedule
from db import rollouts
from db.queries import History
from db.rollout_records import RolloutRecord, RolloutRow, TimelineRow

T = TypeVar("T")

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
        if not as_json:
            click.echo(one_line(_row(context, uid), time.time_ns()))
        return Done(exit_code(state), status_document(_read(context, uid), time.time_ns()))

    def explain() -> str:
        return foreground.explain() if foreground is not None else f"interrupted; rollout {name} was not started"

    context.start_log()
    return run_ahead(schedule, due, explain, as_json)


@click.command("status", short_help="Show its nodes, gates, timeline and what it waits for.")
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
        rows = _asked(context, rollouts.listed) or ()
        if as_json:
            emit({"rollouts": [row_document(row) for row in rows]})
        for row in rows if not as_json else ():
            click.echo(one_line(row, now_ns))
        return 0
    if as_json:
        emit(status_document(_read(context, name), now_ns))
        return 0
    for line in status_lines(_read(context, name, enough_lines()), now_ns):
        click.echo(clean(line, 2000))
    return 0


@click.command("pause", short_help="Begin nothing more; what is under way goes on.")
@name_argument
@json_option
@click.pass_obj
def pause(context: Context, name: str, as_json: bool) -> int:
    """Begin nothing more of rollout NAME; what is under way goes on, and waits.

    Exit codes: 0 paused, 1 refused, 2 no such rollout.
    """
    return _ask(context, name, "pause", {}, as_json)


@click.command("resume", short_help="Go on, here if nobody carries it out.")
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


@click.command("promote", short_help="Go on past a pause, an inconclusive gate, a failed node.")
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


@click.command("retry", short_help="Try a node once more.")
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


@click.command("skip", short_help="Leave a node out, saying why.")
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


@click.command("abort", short_help="End it; what was taken out of traffic is brought back.")
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
    """Ask the rollout's controller, or be it."""
    context.start_log()
    row = _row(context, name)
    if row.finished_ns is not None:
        raise over(row)
    with opened_store(context) as store:
        came_to = Foreground(context, store).ask(row, verb, arguments)
    if not isinstance(came_to, RolloutState):
        return _told(context, row, verb, came_to, as_json)
    code = _ended(context, row.rollout_uid, came_to, as_json)
    return 0 if verb == "abort" and code == 4 else code


def _told(context: Context, row: RolloutRow, verb: str, answer: Answer, as_json: bool) -> int:
    done, text = answer
    if as_json:
        emit({**row_document(_row(context, row.rollout_uid)), "verb": verb, "done": done, "answer": text})
    else:
        click.echo(clean(f"{verb} {row.name}: {text}", 1000))
    return 0 if done else 1


def _ended(context: Context, uid: str, state: RolloutState, as_json: bool) -> int:
    if as_json:
        emit(status_document(_read(context, uid), time.time_ns()))
    else:
        click.echo(one_line(_row(context, uid), time.time_ns()))
    return exit_code(state)


def _read(context: Context, name: str, is_enough: Callable[[TimelineRow], bool] = lambda entry: False) -> RolloutRecord:
    return _known(name, _asked(context, lambda history: rollouts.read(history, name, is_enough=is_enough)))


def _row(context: Context, name: str) -> RolloutRow:
    return _known(name, _asked(context, lambda history: rollouts.find(history, name)))


def _known(name: str, found: T | None) -> T:
    if found is None:
        raise UsageError(f"no rollout {clean(name, 80)!r} was ever started here")
    return found


def _asked(context: Context, question: Callable[[History], T]) -> T | None:
    """Ask the history; None where nothing was ever recorded."""
    try:
        with History(context.locations.history_file) as history:
            return question(history)
    except db.errors.NoHistoryError:
        return None
    except db.errors.HistoryError as error:
        raise HistoryError(str(error)) from error
