"""Brings one host to the console's version of the agent, or back to its former one; step by step, each told.

Nothing changes for the agent at work before the host's own part, the verb ``install``, has it end of itself.
"""

from __future__ import annotations

import json
import posixpath
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace

from console.clean import clean, clean_record
from console.config_nodes import Node
from console.deployment.agent_file import AgentFile
from console.deployment.host_check import HostFacts, Problem, begin_script, check_script, find_problems, read_facts
from console.errors import DeployFailed, LinkLost, UploadFailed
from console.format import size_text
from console.transports.gate import Gate
from console.transports.ssh_host import SshHost, open_host
from remote_agent.protocol.codec import decode
from remote_agent.protocol.messages import Installed, InstallTold

CHECK_SILENCE_S = 60.0
"""A check asks for a mount's space and starts Pythons, all of which a slow disk may delay."""
INSTALL_SILENCE_S = 150.0
"""Longer than an agent may take to end and the next to start."""

SPARE_BYTES = 1 << 20
READY = "ready"

Say = Callable[[str], None]


@dataclass(frozen=True)
class Order:
    """``is_rollback``: back to the former version. ``wait_s``: for the work of the agent there to end."""

    file: AgentFile
    is_check: bool = False
    is_rollback: bool = False
    wait_s: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """``installed`` None: nothing was done but look, since no more was asked for or the host is not fit."""

    facts: HostFacts
    problems: tuple[Problem, ...]
    installed: Installed | None = None

    @property
    def is_fit(self) -> bool:
        return not any(problem.severity == "error" for problem in self.problems)


async def deploy(node: Node, order: Order, gate: Gate, say: Say) -> Outcome:
    """Look at the node's host and, unless only that is asked for, bring the version in.

    Raises: DeployFailed, UploadFailed, LinkError; the agent at work is what it was then.
    """
    if node.transport:
        text = f"is reached by {node.transport[0]}, and deploy uses SSH: put the agent into what that starts"
        raise DeployFailed(f"{node.name}: {text}")
    script_token = _token()
    script = check_script(node, script_token)
    async with await open_host(node, gate, say=say) as host:
        say("looks at the host")
        facts = await _check(node, host, script, script_token)
        needed_bytes = 0 if order.is_rollback else len(order.file.content) + SPARE_BYTES
        outcome = Outcome(facts, find_problems(node, facts, needed_bytes))
        if order.is_check or not outcome.is_fit:
            return outcome
        return replace(outcome, installed=await _install(node, host, facts, order, say))


async def _check(node: Node, host: SshHost, script: str, token: str) -> HostFacts:
    lines: dict[str, str] = {}
    candidates: list[str] = []

    def heard(text: str) -> None:
        name, _, value = text.partition("=")
        if name == "candidate":
            candidates.append(value)
        else:
            lines[name] = value

    said = await host.run(script, token, heard, CHECK_SILENCE_S)
    if not lines:
        raise DeployFailed(f"{node.name}: no POSIX shell answers there: {said or 'it says nothing'}", "no_shell")
    return read_facts(node, lines, tuple(candidates))


async def _install(node: Node, host: SshHost, facts: HostFacts, order: Order, say: Say) -> Installed:
    arguments = ["install", "--link", facts.link, "--wait", f"{order.wait_s:g}"]
    if node.state_directory is not None:
        arguments += ["--state-dir", facts.state.directory]
    if order.is_rollback:
        if facts.previous is None:
            raise DeployFailed(f"{node.name}: there is no former version to go back to", "no_former")
        return await _begin(node, host, facts.previous, None, b"", arguments, say)
    path = posixpath.join(facts.target.directory, "versions", f".upload-{secrets.token_hex(8)}.pyz")
    content = order.file.content
    say(f"uploads {size_text(len(content))}")
    if not await _upload(host, path, content, say):
        return await _begin(node, host, path, order.file.sha256, content, arguments, say)
    return await _begin(node, host, path, order.file.sha256, b"", arguments, say)


async def _upload(host: SshHost, path: str, content: bytes, say: Say) -> bool:
    """Return whether SFTP brought the file there; a login shell that talks would be taken for SFTP's own words."""
    if host.was_noisy:
        say("its login shell writes to standard output, so the file goes through a command, not by SFTP")
        return False
    try:
        await host.put(path, content)
    except UploadFailed as error:
        say(f"{error}: the file goes through a command instead")
        return False
    return True


async def _begin(
    node: Node, host: SshHost, path: str, sha256: str | None, payload: bytes, arguments: list[str], say: Say
) -> Installed:
    """Have the host see that the file is whole, and become its ``install``. Raises: DeployFailed, LinkError"""
    token, told = _token(), list[InstallTold]()
    arguments = [*arguments, "--tell", token]
    request = {"path": path, "sha256": sha256, "size_bytes": len(payload), "arguments": arguments}

    def heard(text: str) -> bytes | None:
        message, before = _read(node, text), told[-1] if told else None
        told.append(message)
        if message.step == READY:
            return json.dumps(request).encode() + b"\n" + payload
        if message.step is not None and message != before:  # a wait is told again and again, to show that it goes on
            say(message.step)
        return None

    said = await host.run(begin_script(node, token), token, heard, INSTALL_SILENCE_S)
    last = told[-1] if told else InstallTold()
    if last.error is not None:
        raise DeployFailed(f"{node.name}: {last.error}", last.code)
    if last.done is None:
        raise LinkLost(f"{node.name}: the host did not say how it ended: {said or 'the connection is closed'}")
    return last.done


def _read(node: Node, text: str) -> InstallTold:
    try:
        return clean_record(decode(InstallTold, json.loads(text)))
    except (ValueError, RecursionError) as error:
        raise LinkLost(f"{node.name}: the host's answer can't be read: {clean(str(error), 200)}") from error


def _token() -> str:
    return f"glowplug-{secrets.token_hex(8)}"
