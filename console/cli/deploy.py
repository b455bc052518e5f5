"""``glowplug deploy``"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import click

from console.clean import clean
from console.cli.common import Context, emit, json_option, run_async, say
from console.cli.nodes import Answer, exit_code
from console.config_nodes import Node
from console.deployment.agent_file import AgentFile, build_installed
from console.deployment.host_check import HostFacts, Problem
from console.deployment.upgrade import Order, Outcome, deploy
from console.errors import GlowplugError, UsageError
from console.format import size_text
from console.transports.gate import Gate
from remote_agent.protocol.messages import INSTALL_WAIT_MOST_S


@click.command("deploy")
@click.argument("node", nargs=-1, required=True)
@click.option("--check", "is_check", is_flag=True, help="Only look at the hosts and say what is missing.")
@click.option("--rollback", "is_rollback", is_flag=True, help="Back to the version that was current before.")
@click.option("--wait", "wait_s", type=float, default=0.0, metavar="SECONDS", help="For the old agent's work to end.")
@json_option
@click.pass_obj
def command(
    context: Context, node: tuple[str, ...], is_check: bool, is_rollback: bool, wait_s: float, as_json: bool
) -> int:
    """Bring this version of the agent to each NODE, over SSH, and have it take over from the one there.

    The host is looked at first; what is missing is said with its fix. What is resident stays. An agent that runs
    something, or whose process holds a model, is left as it is, unless its work ends while --wait lasts. A second
    --rollback undoes the first.

    Exit codes: 0 done everywhere, 1 a node is not fit, or keeps its agent, 2 usage, 3 a node out of reach.
    """
    if is_check and is_rollback:
        raise UsageError("give --check or --rollback, not both")
    if not 0 <= wait_s <= INSTALL_WAIT_MOST_S:
        raise UsageError(f"--wait: {wait_s:g} is not within 0..{INSTALL_WAIT_MOST_S:g} seconds")
    nodes = context.load_config().select(node)
    context.start_log()
    file = build_installed(context.locations.cache_directory)
    order = Order(file, is_check, is_rollback, wait_s)
    gate = Gate.create(context.locations, context.environ)
    answers = run_async(_deploy_all(nodes, order, gate, as_json))
    if as_json:
        emit({"agent": _document_of_file(file), "nodes": [_document(answer) for answer in answers]})
    unfit = [answer for answer in answers if answer.value is not None and not answer.value.is_fit]
    return 1 if unfit else exit_code(answers)


async def _deploy_all(nodes: Sequence[Node], order: Order, gate: Gate, as_json: bool) -> list[Answer[Outcome]]:
    """Deploy to every node at once, each told as it ends, and return what became of each in order."""

    async def one(node: Node) -> Answer[Outcome]:
        try:
            answer = Answer(node.name, await deploy(node, order, gate, lambda text: say(f"{node.name}: {text}")))
        except GlowplugError as error:
            answer = Answer[Outcome](node.name, error=error)
        for line in () if as_json else _lines(answer):
            click.echo(clean(line, 2000))
        return answer

    return list(await asyncio.gather(*(one(node) for node in nodes)))


def _lines(answer: Answer[Outcome]) -> Iterator[str]:
    outcome = answer.value
    if outcome is None:
        yield f"✖ {answer.node:<14} {str(answer.error).removeprefix(f'{answer.node}: ')}"
        return
    done = outcome.installed
    if done is None:
        yield f"{'✔' if outcome.is_fit else '✖'} {answer.node:<14} {_facts_text(outcome.facts)}"
    elif done.before == done.digest:
        yield f"✔ {answer.node:<14} agent {done.version} ({done.digest}) is current and runs (process {done.pid})"
    else:
        before = f", was {done.before}" if done.before else ""
        how = "took over" if done.was_running else "runs"
        yield f"✔ {answer.node:<14} agent {done.version} ({done.digest}{before}) {how} (process {done.pid})"
    for problem in outcome.problems:
        yield f"{'✖' if problem.severity == 'error' else '!'} {answer.node:<14} {problem.line()}"


def _facts_text(facts: HostFacts) -> str:
    torch = f"torch {facts.torch_version} ({facts.torch_cuda or 'CPU'})" if facts.torch_version else "no torch"
    free = f"{size_text(facts.target.free_bytes)} free" if facts.target.free_bytes is not None else "? free"
    driver = "NVIDIA driver" if facts.driver else "no NVIDIA driver"
    return "  ".join((facts.machine, f"Python {facts.python_version or '?'}", torch, driver, free))


def _document_of_file(file: AgentFile) -> dict[str, object]:
    return {"version": file.version, "sha256": file.sha256, "size_bytes": len(file.content), "path": str(file.path)}


def _document(answer: Answer[Outcome]) -> dict[str, object]:
    from remote_agent.protocol.codec import encode

    outcome = answer.value
    return {
        "node": answer.node,
        "error": str(answer.error) if answer.error else None,
        "code": getattr(answer.error, "code", "") if answer.error else "",
        "host": _host_document(outcome.facts) if outcome else None,
        "problems": [_problem_document(problem) for problem in outcome.problems] if outcome else [],
        "installed": encode(outcome.installed) if outcome else None,
    }


def _host_document(facts: HostFacts) -> dict[str, object]:
    return {
        "system": facts.system,
        "machine": facts.machine,
        "python": facts.python,
        "python_version": facts.python_version,
        "torch_version": facts.torch_version,
        "torch_cuda": facts.torch_cuda or None,
        "driver": facts.driver,
        "target": facts.target.directory,
        "target_filesystem": facts.target.filesystem,
        "target_free_bytes": facts.target.free_bytes,
        "state": facts.state.directory,
        "state_filesystem": facts.state.filesystem,
    }


def _problem_document(problem: Problem) -> dict[str, object]:
    return {"severity": problem.severity, "code": problem.code, "text": problem.text, "fix": problem.fix}
