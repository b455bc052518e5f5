"""Any argv that gives stdio: what it says when it fails, and that nothing of it is left."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from console.config_nodes import Node
from console.errors import NodeMisconfigured
from console.transports import agent_command
from console.transports.base import TimedOut, bounded
from console.transports.command import CommandStream, open_command
from tests.console.links import soon
from tests.console.sshd import stub_settings


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def opened(*transport: str, **settings: Any) -> CommandStream:
    return await open_command(Node("gpu-1", transport=transport, **{**stub_settings(), **settings}), "token-1")


async def read_all(stream: CommandStream) -> bytes:
    data = b""
    while chunk := await stream.read():
        data += chunk
    return data


async def test_a_program_that_does_not_exist_is_named() -> None:
    """The first word of the transport, and the system's own reason."""
    with pytest.raises(NodeMisconfigured, match="gpu-1: no-such-program: No such file"):
        await opened("no-such-program")


async def test_what_the_program_says_on_stderr_is_the_reason() -> None:
    """Not mixed into the stream, cleaned, with the exit status."""
    stream = await opened("sh", "-c", 'printf "error: pod \\033[31mgone\\033[0m\\n" >&2; exit 4', "sh")
    data = await bounded(read_all(stream), 20.0)
    await stream.close()

    assert data == b""
    assert stream.exit_reason() == "sh ended with 4: error: pod gone"


async def test_closing_ends_a_bridge_by_the_end_of_its_input() -> None:
    """A process that reads to the end is never killed."""
    stream = await opened("env", python=("sh", "-c", "cat >/dev/null; exit 0"), agent=("x",))
    await stream.close()

    assert stream.exit_reason() is None


async def test_closing_ends_whatever_does_not_end_by_itself() -> None:
    """Deaf to its input and to SIGTERM, with a child that holds the pipes: both are gone."""
    ignore = "import os, signal, time; signal.signal(15, signal.SIG_IGN); os.fork()\n"
    deaf = ignore + 'os.write(1, b"%d\\n" % os.getpid())\nwhile True: time.sleep(60)'
    stream = await opened(sys.executable, "-c", deaf)
    data = b""
    while data.count(b"\n") < 2:
        data += await bounded(stream.read(), 20.0)
    pids = [int(word) for word in data.split()]
    await bounded(stream.close(), 20.0)

    assert len(pids) == 2
    await soon(lambda: not any(is_running(pid) for pid in pids), "both processes gone")


async def test_an_abort_ends_a_read() -> None:
    """Whoever waits for bytes is told that there will be none."""
    stream = await opened("env", **stub_settings("never a mark"))
    reading = asyncio.ensure_future(stream.read())
    await asyncio.sleep(0)
    stream.abort()

    assert await bounded(reading, 20.0) == b""
    await stream.close()


async def test_a_bounded_wait_gives_up_on_what_can_not_even_be_cancelled() -> None:
    """Clean-up that hangs is left behind; the caller goes on."""
    release = asyncio.Event()

    async def stubborn() -> None:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                pass

    with pytest.raises(TimedOut):
        await bounded(stubborn(), 0.01)
    release.set()


@pytest.mark.parametrize("shell", ["sh", "bash", "dash"])
def test_the_script_finds_an_uploaded_agent_and_falls_back_to_the_installed_one(tmp_path: Path, shell: str) -> None:
    """Without a configured agent the host decides: the uploaded file, else the module."""
    node = Node("gpu-1", python=("echo", "-n"), state_directory="~/state dir")
    run = [shell, "-c", agent_command.build(node, "token-1")]
    environ = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    installed = subprocess.run(run, env=environ, capture_output=True, text=True, check=True).stdout
    upload = tmp_path / ".local/share/glowplug/glowplug-agent.pyz"
    upload.parent.mkdir(parents=True)
    upload.touch()
    uploaded = subprocess.run(run, env=environ, capture_output=True, text=True, check=True).stdout

    tail = f"bridge --mark token-1 --state-dir {tmp_path}/state dir"
    assert installed.removeprefix("-n ") == f"-m remote_agent {tail}" + ("\n" if installed.startswith("-n") else "")
    assert uploaded.removeprefix("-n ").strip() == f"{upload} {tail}"


def test_arguments_reach_the_interpreter_as_they_are_written(tmp_path: Path) -> None:
    """Spaces, semicolons, globs and non-ASCII are data in every argument."""
    show = tmp_path / "show it"
    show.write_text("#!/bin/sh\nprintf '<%s>' \"$@\"\n")
    show.chmod(0o755)
    node = Node("gpu-1", python=(str(show), "a b;c"), agent=("*", "é &|<>(){}#~"))
    for argv in (["bash", "-c", agent_command.build(node, "t-1")], ["env", *agent_command.argv(node, "t-1")]):
        output = subprocess.run(argv, capture_output=True, text=True, check=True, cwd=tmp_path).stdout
        assert output == "<a b;c><*><é &|<>(){}#~><bridge><--mark><t-1>"


@pytest.mark.parametrize("item", ["'", '"', "\\", "$x", "`x`", "!", "a\nb", ""])
def test_an_argument_that_a_shell_could_act_on_is_never_built(item: str) -> None:
    """Also for nodes that did not come from a checked file."""
    for node in (Node("gpu-1", python=(item,)), Node("gpu-1", agent=(item,)), Node("gpu-1", state_directory=item)):
        with pytest.raises(NodeMisconfigured):
            agent_command.build(node, "token")
