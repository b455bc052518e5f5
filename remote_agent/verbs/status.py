"""``status``: what runs and what is held on this host."""

from __future__ import annotations

import argparse

from remote_agent.client import connect_running, open_client
from remote_agent.protocol.messages import Empty, StatusResult
from remote_agent.verbs._common import guarded, make_parser, print_json, state_of


def main(argv: list[str]) -> int:
    """Return 0, or 1 where no agent runs; starts none."""
    arguments = make_parser("status", "What runs and what is held on this host.").parse_args(argv)
    return guarded(lambda: _status(arguments))


def _status(arguments: argparse.Namespace) -> int:
    with open_client(state_of(arguments), "status", connect_running) as client:
        status = client.call("status", Empty(), StatusResult)
    if arguments.json:
        print_json(status)
        return 0
    for run in status.runs:
        stage = next((stage.name for stage in reversed(run.stages) if stage.start_ns is not None), "-")
        print(f"run {run.run_uid}  {run.recipe}  {run.state.value}  {stage}")
    for held in status.residents:
        attached = f"  {held.attached} attached" if held.attached else ""
        attached += "".join(f"  serves on {server.address} ({server.pid})" for server in held.servers)
        size = f"{held.bytes / 1e9:.2f} GB"
        print(f"{held.tier.value}  {held.recipe} on {held.device}  {size}  run {held.run_uid}{attached}")
    if not status.runs and not status.residents:
        print("nothing runs and nothing is held")
    for finding in status.probe.findings if status.probe else ():
        print(f"{finding.severity}: {finding.text}")
    print("  ".join(f"{name}: {pid}" for name, pid in status.processes.items() if pid is not None))
    return 0
