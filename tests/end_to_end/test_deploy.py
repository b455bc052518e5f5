"""``glowplug deploy`` against OpenSSH's server, its login shells, and hosts that fail half way."""

from __future__ import annotations

import asyncio
import dataclasses
import getpass
import io
import os
import random
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from console.config_nodes import Node
from console.deployment.agent_file import AgentFile, build_installed
from console.deployment.upgrade import SPARE_BYTES, Order, Outcome, deploy
from console.errors import DeployFailed, LinkError
from console.format import size_text
from remote_agent.agentd.daemon import holder
from remote_agent.versions import Versions, digest_of
from tests.console.links import gate, soon
from tests.end_to_end.hosts import AGENT, OwnHost, Workstation, node_table
from tests.needs import need

pytestmark = pytest.mark.ssh

NOISE = (
    'printf \'\\033[33m! Only /data stays\\033[0m\\nglowplug-0 end=yes\\n{"step": "ready"}\\nno line end\'\nset -x\n'
)
"""For a .bashrc: colour, what looks like an answer, half a line, a trace of each command."""

KILLED_DEPLOY = """
{ sh -c 'echo $$; exec glowplug deploy gpu-1' 2>&1 || true; } | {
    read -r pid; read -r looks; read -r uploads; kill -9 "$pid"; echo "$uploads"
}
"""
"""Kills the console when it says that it uploads."""

SHELLS = {"bash": "bash", "dash": "dash", "zsh": "zsh", "fish": "fish", "csh": "csh"}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[AgentFile, AgentFile]:
    """Two versions of the agent."""
    file = build_installed(tmp_path_factory.mktemp("cache"))
    buffer = io.BytesIO(file.content)
    with zipfile.ZipFile(buffer, "a") as archive:
        archive.writestr("NAME", "another")
    return file, dataclasses.replace(file, content=buffer.getvalue())


@pytest.fixture
def make_host(tmp_path: Path) -> Iterator[Callable[..., OwnHost]]:
    """Return a function that starts a host with nothing on it."""
    made: list[OwnHost] = []

    def make(**settings: object) -> OwnHost:
        made.append(OwnHost(tmp_path / f"host{len(made)}", **settings))  # type: ignore[arg-type]
        with (made[-1].sshd.directory / "sshd_config").open("a") as file:
            file.write("MaxSessions 1\n")
        return made[-1].start()

    yield make
    for host in made:
        host.close()


def node_of(host: OwnHost, **changes: object) -> Node:
    settings = {"python": (sys.executable,), "agent": (), "user": getpass.getuser(), **changes}
    return host.sshd.node("gpu-1", **settings)


def versions_of(host: OwnHost) -> Versions:
    return Versions(host.home / AGENT)


def current(host: OwnHost) -> str:
    """Return the digest of the current version, seen to be whole."""
    file = versions_of(host).current()
    assert file is not None
    assert digest_of(file) == file.parent.name
    return file.parent.name


async def bring(host: OwnHost, file: AgentFile, folder: Path, say: Callable[[str], None] = print) -> Outcome:
    return await deploy(node_of(host), Order(file), gate(folder), say)


def test_a_bare_host_is_checked_and_gets_its_agent(make_host: Callable[..., OwnHost], tmp_path: Path) -> None:
    """--check touches nothing, a killed console harms nothing; then the file is where the other verbs look."""
    host, workstation = make_host(), Workstation(tmp_path / "workstation")
    workstation.configure(node_table("gpu-1", host.sshd) + node_table("away", host.sshd, port=1))
    checked = workstation.glowplug("deploy", "gpu-1", "--check")
    touched = list(host.home.iterdir())
    killed = workstation.shell(KILLED_DEPLOY)
    both = workstation.glowplug("deploy", "gpu-1", "away", "--json")
    status = workstation.glowplug("status", "gpu-1")
    (reached, lost) = both.document["nodes"]
    no_former = workstation.glowplug("deploy", "gpu-1", "--rollback")

    assert (checked.code, touched) == (0, []), checked
    assert "uploads" in killed.out, killed
    assert checked.out.startswith(f"✔ gpu-1          {os.uname().machine}  Python 3.")
    assert (both.code, lost["installed"]) == (3, None), both
    assert "refused" in lost["error"].lower()
    assert current(host) == reached["installed"]["digest"] == both.document["agent"]["sha256"][:16]
    assert reached["installed"]["pid"] == holder(host.state)
    assert (status.code, "nothing runs" in status.out) == (0, True)
    assert (no_former.code, "no former version" in no_former.out) == (1, True), no_former


async def test_a_shell_that_talks_gets_the_file_another_way_and_a_version_back(
    make_host: Callable[..., OwnHost], tmp_path: Path, files: tuple[AgentFile, AgentFile]
) -> None:
    """Where start-up files write to standard output SFTP can't work; an upgrade takes over, a rollback comes back."""
    host = make_host(
        shell="bash", environment={"BASH_ENV": str(tmp_path / "host0" / "home" / ".bashrc"), "PATH": "/bin"}
    )
    (host.home / ".bashrc").write_text(NOISE)
    said: list[str] = []
    first = (await bring(host, files[0], tmp_path, said.append)).installed
    second = (await bring(host, files[1], tmp_path, said.append)).installed
    back = (await deploy(node_of(host), Order(files[0], is_rollback=True), gate(tmp_path), said.append)).installed

    assert first is not None
    assert second is not None
    assert back is not None
    assert any("goes through a command, not by SFTP" in line for line in said)
    assert (second.digest, second.before, second.was_running) == (files[1].sha256[:16], first.digest, True)
    assert (back.digest, back.before, back.pid) == (first.digest, second.digest, holder(host.state))
    assert current(host) == first.digest


@pytest.mark.parametrize("shell", SHELLS)
async def test_every_login_shell_hands_the_scripts_on(
    make_host: Callable[..., OwnHost], tmp_path: Path, files: tuple[AgentFile, AgentFile], shell: str
) -> None:
    """The check answers in full, and a path with a blank, a quote's neighbour and a star stays one word."""
    host = make_host(shell=need(shell, SHELLS[shell]))
    state = host.home / "state * of; mine"
    node = node_of(host, state_directory=str(state))
    outcome = await deploy(node, Order(files[0], is_check=True), gate(tmp_path), print)

    facts = outcome.facts
    assert (facts.system, facts.python_fits, facts.has_home) == ("Linux", True, True)
    assert (facts.link, facts.state.directory) == (str(host.home / AGENT), str(state))
    assert not [problem for problem in outcome.problems if problem.severity == "error"]


@pytest.mark.parametrize(
    ("start_up", "text"),
    [
        ("while :; do echo still waiting; sleep 0.05; done", "no answer within 1 s, but: .*still waiting"),
        ("while :; do printf %4096s; done", "the host writes a line of more than 1048576 bytes"),
    ],
)
async def test_a_host_that_writes_without_end_is_given_up_by_name(
    make_host: Callable[..., OwnHost],
    tmp_path: Path,
    files: tuple[AgentFile, AgentFile],
    monkeypatch: pytest.MonkeyPatch,
    start_up: str,
    text: str,
) -> None:
    """Line by line, where only a script's own lines count as an answer, or without any line's end."""
    monkeypatch.setattr("console.deployment.upgrade.CHECK_SILENCE_S", 1.0)
    host = make_host(shell="bash", environment={"BASH_ENV": str(tmp_path / "host0" / "home" / ".bashrc")})
    (host.home / ".bashrc").write_text(f"{start_up}\n")
    with pytest.raises(LinkError, match=f"^gpu-1: {text}"):
        await bring(host, files[0], tmp_path)


async def test_a_host_without_a_fitting_python_is_told_which_one_would_fit(
    make_host: Callable[..., OwnHost], tmp_path: Path, files: tuple[AgentFile, AgentFile]
) -> None:
    """The node's python is too old; nothing is uploaded, and one line names what is there instead."""
    host = make_host()
    old, fitting = tmp_path / "python3", host.home / "venv" / "bin" / "python3"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && exec echo Python 3.6.8\necho SyntaxError >&2\nexit 1\n')
    old.chmod(0o755)
    fitting.parent.mkdir(parents=True)
    fitting.symlink_to(sys.executable)
    outcome = await deploy(node_of(host, python=(str(old),)), Order(files[0]), gate(tmp_path), print)

    text = f'no Python 3.10 or newer: {old} is 3.6.8; set python = "{fitting}" for the node, which fits'
    assert [problem.line() for problem in outcome.problems] == [text]
    assert (outcome.installed, (host.home / ".local").exists()) == (None, False)


@pytest.fixture
def small(make_host: Callable[..., OwnHost]) -> Iterator[OwnHost]:
    """A host whose home is a small file system that runs nothing."""
    if os.geteuid() != 0:
        pytest.skip("needs root: mounts a file system")
    host = make_host()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m,noexec", "tmpfs", host.home], check=True)
    yield host
    subprocess.run(["umount", "--lazy", host.home], check=True)


async def test_a_disk_that_fills_up_during_the_upload_costs_nothing(
    small: OwnHost, tmp_path: Path, files: tuple[AgentFile, AgentFile]
) -> None:
    """It is full by surprise: the error is the host's own word, and no part of a file stays. Then it is said."""
    much = small.home / "much"

    def fill(text: str) -> None:
        if text.startswith("uploads"):
            subprocess.run(["dd", "if=/dev/zero", f"of={much}"], stderr=subprocess.DEVNULL, check=False)

    with pytest.raises(DeployFailed, match=r"upload-\w+\.pyz: No space left on device"):
        await bring(small, files[0], tmp_path, fill)
    left = [path for path in small.home.rglob("*") if path.is_file() and path.stat().st_size]
    again = await bring(small, files[0], tmp_path)

    assert left == [much]
    assert again.installed is None
    assert [problem.code for problem in again.problems] == ["full", "state_full", "state_noexec"]
    needed = size_text(len(files[0].content) + SPARE_BYTES)
    assert f"has 0 B free, {needed} are needed; free some there" in again.problems[0].line()


@pytest.mark.faults
async def test_a_connection_that_is_cut_anywhere_leaves_a_version_that_works(
    make_host: Callable[..., OwnHost], tmp_path: Path, files: tuple[AgentFile, AgentFile]
) -> None:
    """Seeded: sshd's side is killed at some moment of the check, the upload or the handing over; the next one works."""
    host, chance, cut = make_host(), random.Random(4), 0
    await bring(host, files[0], tmp_path)

    def kill() -> None:
        for pid in host.sshd.connection_processes():
            os.kill(pid, signal.SIGKILL)

    for number in range(4):
        step, delay_s = chance.choice([("looks", 0.1), ("uploads", 0.02), ("uploads", 0.4)])

        def at_the_step(text: str, step: str = step, delay_s: float = delay_s * chance.random()) -> None:
            if text.startswith(step):
                asyncio.get_running_loop().call_later(delay_s, kill)

        try:
            await bring(host, files[(number + 1) % 2], tmp_path, at_the_step)
        except LinkError:
            cut += 1
        await soon(lambda: not any("install" in words for words in host.processes().values()), "the host is at rest")
        assert current(host) in {file.sha256[:16] for file in files}
    done = (await bring(host, files[1], tmp_path)).installed

    assert cut > 0
    assert done is not None
    assert (current(host), holder(host.state)) == (files[1].sha256[:16], done.pid)
