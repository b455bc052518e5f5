"""``run RECIPE``: warms a recipe through every stage on this host, through its agent."""

from __future__ import annotations

import argparse
import shlex
import socket
import uuid
from pathlib import Path

from remote_agent.agentd import hostfacts
from remote_agent.client import Client, open_client
from remote_agent.errors import RefusedError
from remote_agent.protocol.messages import (
    Actor,
    Event,
    Finding,
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
from remote_agent.recipe import read_recipe
from remote_agent.verbs._common import FAILED, INTERRUPTED, guarded, make_parser, print_json, state_of


def main(argv: list[str]) -> int:
    """Return 0 when the model is ready, 1 when the run ended otherwise, 2 for a usage error, 130 if interrupted."""
    parser = make_parser("run", "Warm a recipe through every stage and keep the model until it is released.")
    parser.add_argument("recipe", type=Path, help="a recipe in TOML or JSON")
    parser.add_argument("--release", action="store_true", help="let the model go when it was ready")
    parser.add_argument("--python", default="", help="the Python with torch, as a command line (default: this one)")
    arguments = parser.parse_args(argv)
    return guarded(lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> int:
    recipe = read_recipe(arguments.recipe)
    actor = Actor(hostfacts.user_name(), socket.gethostname())
    python = tuple(shlex.split(arguments.python))
    params = RunStartParams(str(uuid.uuid4()), recipe, actor, python)
    with open_client(state_of(arguments), "run") as client:
        return _follow(client, params, arguments)


def _follow(client: Client, params: RunStartParams, arguments: argparse.Namespace) -> int:
    newest_seq = client.hello("run").newest_seq
    client.call("subscribe", SubscribeParams("", newest_seq, samples=False), SubscribeResult)
    client.call("run.start", params, RunStartResult)
    code = 0
    try:
        record = _wait(client, params.run_uid, show=not arguments.json)
    except KeyboardInterrupt:
        record = client.call("run.cancel", RunUidParams(params.run_uid), RunResult).run
        code = INTERRUPTED
    if arguments.release and record.state is RunState.READY:
        client.call("resident.release", ReleaseParams(params.run_uid), ReleaseResult)
    if arguments.json:
        print_json(record)
    else:
        _print_end(record)
    return code or (0 if record.state is RunState.READY else FAILED)


def _wait(client: Client, run_uid: str, show: bool) -> RunRecord:
    for notification in client.notifications():
        event = notification.params
        if not isinstance(event, Event) or event.run_uid != run_uid:
            continue
        if isinstance(event.data, RunFinished):
            return event.data.run
        if show and isinstance(event.data, StageChanged) and event.data.stage.status.is_over:
            print(_stage_line(event.data.stage), flush=True)
        if show and isinstance(event.data, Finding):
            print(f"  {event.data.severity}: {event.data.text}", flush=True)
    raise RefusedError("no_end", "the agent stopped telling")  # notifications() does not end by itself


def _stage_line(stage: StageRecord) -> str:
    words = [f"{stage.name:<14}{stage.status.value:<8}{(stage.duration_ns or 0) / 1e9:9.3f} s"]
    if stage.bytes:
        words.append(f"{stage.bytes / 1e9:.2f} GB")
    if stage.rate_bytes_s:
        words.append(f"{stage.rate_bytes_s / 1e9:.2f} GB/s")
    words += [text for text in (stage.path, stage.reason) if text]
    return "  ".join(words)


def _print_end(record: RunRecord) -> None:
    wall_s = (record.wall_ns or 0) / 1e9
    if record.state is RunState.READY:
        first_s = (record.first_output_ns or 0) / 1e9
        tier = record.tier_to.value if record.tier_to else "?"
        print(f"ready in {wall_s:.3f} s, first output after {first_s:.3f} s; {record.tier_from.value} -> {tier}")
        return
    print(f"{record.state.value} after {wall_s:.3f} s")
    if record.failure is not None:
        print(f"{record.failure.stage or '-'}: {record.failure.code}: {record.failure.detail}")
        for line in record.failure.log_tail:
            print(f"  | {line}")
