"""Asking ssh: few at a time, once a wave, never for ever, and what it says is not taken on trust."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from pathlib import Path

import pytest

from console.config_nodes import Node
from console.errors import NodeMisconfigured
from console.transports import ssh_oracle
from console.transports.ssh_oracle import ASK_LIMIT, NoClient, Oracle, Question, parse
from console.transports.ssh_target import resolve
from tests.console.links import gate, soon

ANSWER = "host h\nhostname h\nport 22\nuser u"


def fake_ssh(directory: Path, body: str) -> str:
    path = directory / "fake-ssh"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


async def test_a_wave_asks_about_a_bastion_once(tmp_path: Path) -> None:
    """Thirty nodes behind one: each is asked about, the bastion once; a later node asks anew."""
    asked = tmp_path / "asked"
    jump = 'case "$*" in *bastion*|*invalid*) ;; *) echo proxyjump bastion;; esac'
    ssh = fake_ssh(tmp_path, f'echo "$*" >>{asked}\nprintf "{ANSWER}\\n"\n{jump}')
    shared = dataclasses.replace(gate(tmp_path), ssh=ssh)
    await asyncio.gather(*(resolve(Node(f"gpu-{index}"), shared) for index in range(30)))
    first = asked.read_text().splitlines()
    await resolve(Node("gpu-1"), shared)

    assert sorted(first) == sorted(
        [*(f"-G -- gpu-{index}" for index in range(30)), "-G -- bastion", "-G -F none -- host.invalid"]
    )
    assert asked.read_text().splitlines()[len(first) :] == ["-G -- gpu-1", "-G -- bastion"]


async def test_no_more_than_a_few_are_asked_at_once(tmp_path: Path) -> None:
    """The others wait; when one has answered the next begins."""
    started, go = tmp_path / "started", tmp_path / "go"
    started.mkdir()
    os.mkfifo(go)
    oracle = Oracle(fake_ssh(tmp_path, f'touch {started}/$3\nread line <{go}\nprintf "{ANSWER}\\n"'))
    async with oracle:
        asking = [asyncio.ensure_future(oracle.ask("n", Question(f"h{index}"))) for index in range(ASK_LIMIT + 2)]
        await soon(lambda: len(list(started.iterdir())) == ASK_LIMIT, "as many as may have begun")
        assert len(oracle._places._waiters or ()) == 2
        writer = os.open(go, os.O_RDWR)
        os.write(writer, b"go\n" * (ASK_LIMIT + 2))
        answers = await asyncio.gather(*asking)
        os.close(writer)

    assert [answer["hostname"] for answer in answers] == [("h",)] * (ASK_LIMIT + 2)


async def test_options_and_language_are_passed_and_no_shell_reads_them(tmp_path: Path) -> None:
    """User, port and file as ssh's own options, the host after ``--``; C's language whatever the user's is."""
    ssh = fake_ssh(tmp_path, f'printf "{ANSWER}\\n"\nprintf "said %s|" "$@"; echo\necho "language $LC_ALL"')
    async with Oracle(ssh, {"LC_ALL": "de_DE.UTF-8", "PATH": os.environ["PATH"]}) as oracle:
        answer = await oracle.ask("n", Question("h;$(id)", "a b", 2222, "/f g"))

    assert answer["said"] == ("-G|said -F|said /f g|said -l|said a b|said -p|said 2222|said --|said h;$(id)|",)
    assert answer["language"] == ("C",)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("echo nonsense", "gave no answer that can be read: 'nonsense'"),
        ("", "gave no answer that can be read: ''"),
        ("echo hostname h; echo port many", "gave no answer that can be read"),
        ("echo hostname h; echo port 70000", "gave no answer that can be read"),
        ("printf '\\377\\000\\033[31m'", "gave no answer that can be read"),
        ("echo 'bad owner' >&2; exit 255", "says: bad owner"),
        ("kill -9 $$", "says: it ended with -9"),
        ("exec cat /dev/zero", "wrote more than 1 MiB"),
    ],
)
async def test_an_answer_that_is_none_is_named(tmp_path: Path, body: str, words: str) -> None:
    """Clean, in one line, with the node's name; no process is left."""
    async with Oracle(fake_ssh(tmp_path, body)) as oracle:
        with pytest.raises(NodeMisconfigured) as caught:
            await oracle.ask("gpu-1", Question("h"))

    assert str(caught.value).startswith("gpu-1: `ssh -G` ")
    assert words in str(caught.value)
    assert str(caught.value).isprintable()


async def test_what_hangs_is_ended_with_what_it_has_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ``Match exec`` that never ends has a child; both go."""
    monkeypatch.setattr(ssh_oracle, "ORACLE_TIMEOUT_S", 0.3)
    child = tmp_path / "child"
    async with Oracle(fake_ssh(tmp_path, f"sleep 1000 & echo $! >{child}\nwait")) as oracle:
        with pytest.raises(NodeMisconfigured, match=r"gpu-1: `ssh -G` did not answer within 0\.3 s"):
            await oracle.ask("gpu-1", Question("h"))

    await soon(lambda: not _is_running(int(child.read_text())), "the child is gone")


async def test_whoever_stops_asking_leaves_no_process(tmp_path: Path) -> None:
    """The last one of a wave takes the questions along."""
    begun = tmp_path / "begun"
    oracle = Oracle(fake_ssh(tmp_path, f"echo $$ >{begun}.new; mv {begun}.new {begun}\nexec sleep 1000"))

    async def ask() -> None:
        async with oracle:
            await oracle.ask("n", Question("h"))

    asking = asyncio.ensure_future(ask())
    await soon(begun.exists, "ssh has begun")
    asking.cancel()
    await asyncio.wait({asking})

    await soon(lambda: not _is_running(int(begun.read_text())), "ssh is gone")


async def test_no_ssh_is_told_apart_from_an_ssh_that_fails(tmp_path: Path) -> None:
    """Not installed is one thing, not to be started another."""
    async with Oracle(str(tmp_path / "missing")) as oracle:
        with pytest.raises(NoClient):
            await oracle.ask("n", Question("h"))
        assert await oracle.usual() == {}
    async with Oracle(str(tmp_path)) as oracle:
        with pytest.raises(NodeMisconfigured, match="Permission denied"):
            await oracle.ask("n", Question("h"))


def test_values_are_kept_in_order_under_lower_case_keys() -> None:
    """Repeated keys add up; a value may be empty or hold spaces."""
    answer = parse("hostname h\nport 22\nIdentityFile ~/a b\nidentityfile none\nempty\n")

    assert answer["identityfile"] == ("~/a b", "none")
    assert answer["empty"] == ("",)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
