"""``run RECIPE``: warms a recipe through every stage on this host, through its agent."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import socket
import sys
import uuid
from collections.abc import Callable, Iterator
from types import FrameType

from remote_agent.agentd import hostfacts
from remote_agent.client import Client, open_client
from remote_agent.errors import RefusedError
from remote_agent.protocol.codec import encode
from remote_agent.protocol.messages import (
    JOURNAL_UNWRITABLE,
    Actor,
    Empty,
    Event,
    Finding,
    Heartbeat,
    Probe,
    ReleaseParams,
    ReleaseResult,
    RunFinished,
    RunRecord,
    RunResult,
    RunStartParams,
    RunStartResult,
    RunState,
    RunUidParams,
    StageChanged,
    StageRecord,
    SubscribeParams,
    SubscribeResult,
)
from remote_agent.recipe import read_recipe, resolve_paths
from remote_agent.verbs._common import FAILED, guarded, make_parser, path_argument, state_of


class Ended(KeyboardInterrupt):
    """A signal that asks this process to end, handled as Control-C is."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


def main(argv: list[str]) -> int:
    """Return 0 when the model is ready, 1 when the run ended otherwise, 2 for a usage error, 130 if interrupted."""
    parser = make_parser(
        "run",
        "Warm a recipe as far as its target_tier says (cached, host, resident or standby) and keep that until it is "
        "released.",
    )
    add_recipe(parser)
    parser.add_argument("--release", action="store_true", help="let the model go when it was ready")
    return start(parser.parse_args(argv), "run.start")


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """Let a verb take a recipe and the Python to run it with."""
    parser.add_argument(
        "recipe", type=path_argument, help="a recipe in TOML or JSON; relative paths in it start at its own folder"
    )
    parser.add_argument("--python", default="", help="the Python with torch, as a command line (default: this one)")


def start(arguments: argparse.Namespace, method: str) -> int:
    """Start a run by one of the wire's methods, follow it to its end, and return the exit code."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup's word counts
            signal.signal(number, _end)
    return guarded(lambda: _run(arguments, method))


def _end(number: int, frame: FrameType | None) -> None:
    raise Ended(number)


def _run(arguments: argparse.Namespace, method: str) -> int:
    recipe = resolve_paths(read_recipe(arguments.recipe), arguments.recipe.parent)
    actor = Actor(hostfacts.user_name(), socket.gethostname())
    python = tuple(shlex.split(arguments.python)) or (sys.executable,)  # the agent may have been started by another
    params = RunStartParams(str(uuid.uuid4()), recipe, actor, python)
    with contextlib.ExitStack() as clients:
        return _follow(clients, params, arguments, method)


def _follow(clients: contextlib.ExitStack, params: RunStartParams, arguments: argparse.Namespace, method: str) -> int:
    client = clients.enter_context(open_client(state_of(arguments), "run"))
    newest_seq = client.hello("run").newest_seq
    client.call("subscribe", SubscribeParams("", newest_seq, samples=False), SubscribeResult)
    code = 0
    show = _Printer(params.run_uid)
    try:
        client.call(method, params, RunStartResult)
        record = _wait(client, params.run_uid, (lambda line: None) if arguments.json else show)
    except KeyboardInterrupt as interrupt:
        code = int(getattr(interrupt, "exit_code", 128 + signal.SIGINT))
        _tell(f"{str(interrupt) or 'SIGINT'}: cancelling run {params.run_uid}")
        # Another connection: the signal may have come between the bytes of a message, which this one has lost.
        client = clients.enter_context(open_client(state_of(arguments), "run"))
        record = client.call("run.cancel", RunUidParams(params.run_uid), RunResult).run
    if arguments.release and record.state is RunState.READY:
        _release(client, params.run_uid)
    show(json.dumps(encode(record), indent=2) if arguments.json else "\n".join(_end_lines(record)))
    return code or (0 if record.state is RunState.READY else FAILED)


def _release(client: Client, run_uid: str) -> None:
    """Let go what a run left; a run that ended in the page cache left nothing that anybody holds."""
    try:
        client.call("resident.release", ReleaseParams(run_uid), ReleaseResult)
    except RefusedError as refusal:
        if refusal.code != "no_such_resident":
            raise


class _Printer:
    """Prints lines at once. A run outlives its reader: that stdout can't be written is told once, on stderr."""

    def __init__(self, run_uid: str) -> None:
        self._run_uid, self._is_broken = run_uid, False

    def __call__(self, text: str) -> None:
        try:
            print(text, flush=True)
        except OSError as error:
            if not self._is_broken:
                _tell(
                    f"stdout: {error.strerror}; run {self._run_uid} goes on: 'kill {os.getpid()}' cancels it, "
                    f"'release --run {self._run_uid}' lets its model go"
                )
            self._is_broken = True


def _tell(line: str) -> None:
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        pass  # the terminal has gone


def _wait(client: Client, run_uid: str, show: Callable[[str], None]) -> RunRecord:
    is_told = False
    for notification in client.notifications():
        event = notification.params
        if isinstance(event, Heartbeat) and not is_told:
            is_told = _tell_delay(client)
        if not isinstance(event, Event) or event.run_uid != run_uid:
            continue
        if isinstance(event.data, RunFinished):
            return event.data.run
        if isinstance(event.data, StageChanged) and event.data.stage.status.is_over:
            show(_stage_line(event.data.stage))
        if isinstance(event.data, Finding):
            show(f"  {event.data.severity}: {event.data.text}")
    raise RefusedError("no_end", "the agent stopped telling")  # notifications() does not end by itself


def _tell_delay(client: Client) -> bool:
    """Tell a person that the agent holds events back, and return whether it does."""
    findings = client.call("probe", Empty(), Probe).findings
    delays = [finding.text for finding in findings if finding.code == JOURNAL_UNWRITABLE]
    for text in delays:
        _tell(f"{text}; the run goes on, 'status' shows it")
    return bool(delays)


def _stage_line(stage: StageRecord) -> str:
    words = [f"{stage.name:<14}{stage.status.value:<8}{(stage.duration_ns or 0) / 1e9:9.3f} s"]
    if stage.bytes:
        words.append(f"{stage.bytes / 1e9:.2f} GB")
    if stage.rate_bytes_s:
        words.append(f"{stage.rate_bytes_s / 1e9:.2f} GB/s")
    words += [text for text in (stage.path, stage.reason) if text]
    return "  ".join(words)


def _end_lines(record: RunRecord) -> Iterator[str]:
    wall_s = (record.wall_ns or 0) / 1e9
    if record.state is RunState.READY:
        tier = record.tier_to.value if record.tier_to else "?"
        first = "" if record.first_output_ns is None else f", first output after {record.first_output_ns / 1e9:.3f} s"
        yield f"ready in {wall_s:.3f} s{first}; {record.tier_from.value} -> {tier}"
        return
    yield f"{record.state.value} after {wall_s:.3f} s"
    if record.failure is not None:
        yield f"{record.failure.stage or '-'}: {record.failure.code}: {record.failure.detail}"
        yield from (f"  | {line}" for line in record.failure.log_tail)
