"""``glowplug status``"""

from __future__ import annotations

from collections.abc import Iterator

import click

from console import report
from console.cli.common import Context, json_option, run_async
from console.cli.nodes import Answer, ask, show
from console.format import short_uid, size_text
from remote_agent.protocol.codec import encode
from remote_agent.protocol.messages import Finding, StatusResult, Tier


@click.command("status")
@click.argument("node", nargs=-1)
@json_option
@click.pass_obj
def command(context: Context, node: tuple[str, ...], as_json: bool) -> int:
    """Show what runs and what is warm on each NODE; on all of them by default.

    Exit codes: 0 all answered, 3 a node out of reach.
    """
    config = context.load_config()
    names = [one.name for one in (config.select(node) if node else config.nodes)]
    context.start_log()
    answers = run_async(ask(context, config, names, lambda fleet, name: fleet.status(name)))
    return show(answers, as_json, _document, _lines)


def _document(answer: Answer[StatusResult]) -> dict[str, object]:
    status = answer.value
    return {
        "runs": [report.document(report.of_view(answer.node, run)) for run in status.runs] if status else [],
        "residents": encode(status.residents) if status else [],
        "processes": encode(status.processes) if status else {},
        "findings": encode(_memory_findings(status)) if status else [],
    }


def _lines(answer: Answer[StatusResult]) -> Iterator[str]:
    status = answer.value
    if status is None:
        yield f"? {answer.error}"
        return
    if not status.runs and not status.residents:
        yield f"○ {answer.node:<14} nothing runs, nothing is warm"
    for run in status.runs:
        yield report.one_line(report.of_view(answer.node, run))
    for resident in status.residents:
        notes = f"  {resident.attached} attached" if resident.attached else ""
        notes += f"  {size_text(resident.host_bytes)} in host memory" if resident.host_bytes else ""
        notes += "".join(f"  serves on {server.address} (pid {server.pid})" for server in resident.servers)
        glyph = "○" if resident.tier is Tier.ARMED else "✔"
        yield (
            f"{glyph} {answer.node:<14} {resident.recipe:<16} {resident.tier.value:<9} {resident.device:<12} "
            f"{size_text(resident.bytes):>9}  {short_uid(resident.run_uid)}{notes}"
        )
    for finding in _memory_findings(status):
        yield f"! {answer.node:<14} {finding.text}"


def _memory_findings(status: StatusResult) -> tuple[Finding, ...]:
    """Return what a list of warm models leaves open: memory that none of them and no process explains."""
    findings = status.probe.findings if status.probe is not None else ()
    return tuple(finding for finding in findings if finding.code == "memory_unexplained")
