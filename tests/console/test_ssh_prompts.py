"""What a login asks a person, and what comes of each answer."""

from __future__ import annotations

import asyncio
import dataclasses
import getpass
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from console.cli import run
from console.errors import (
    AuthenticationFailed,
    HostKeyChanged,
    HostKeyUnknown,
    NodeUnreachable,
    PromptDeclined,
)
from console.prompts import Prompt, PromptQueue
from console.transports import open_stream
from console.transports.gate import CONNECT_LIMIT
from tests.console.answering import operator, typed
from tests.console.asking_server import asking_server
from tests.console.links import gate, soon
from tests.console.sshd import Sshd, make_key, sign


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Sshd]]:
    """Start OpenSSH servers, each in a directory of its own; all end with the test."""
    servers: list[Sshd] = []

    def start(**options: Any) -> Sshd:
        servers.append(Sshd(tmp_path / f"sshd-{len(servers)}", **options))
        return servers[-1].start()

    yield start
    for server in servers:
        server.stop()


def titles(asked: list[Prompt]) -> list[str]:
    return [prompt.title for prompt in asked]


@pytest.mark.ssh
async def test_an_unknown_host_key_is_taken_once_it_was_typed(serve: Callable[..., Sshd], tmp_path: Path) -> None:
    """Neither another word nor another fingerprint will do. It goes to our own file, once."""
    server = serve()
    node = dataclasses.replace(server.node(), known_hosts=())
    answers = typed("y", "SHA256:other", server.fingerprint())
    async with operator(answers) as (prompts, asked):
        streams = await asyncio.gather(
            *(open_stream(node, "token", gate=shared, prompts=prompts) for shared in [gate(tmp_path)] * 3)
        )
        for stream in streams:
            await stream.close()

    assert set(titles(asked)) == {"gpu-1: unknown host key"}
    assert server.fingerprint() in asked[0].lines
    assert asked[1].problem == "That is neither yes nor this fingerprint."
    assert (tmp_path / "our_known_hosts").read_text() == f"{server.known_hosts_line()}\n"


@pytest.mark.ssh
async def test_a_host_key_that_is_not_accepted_is_not_asked_about_again(
    serve: Callable[..., Sshd], tmp_path: Path
) -> None:
    """`no` and closing the question are the same; nothing is written. Reconnecting by hand asks."""
    node = dataclasses.replace(serve().node(), known_hosts=())
    async with operator(typed("no")) as (prompts, asked):
        for _ in range(2):
            with pytest.raises(PromptDeclined, match=r"gpu-1: unknown host key: SHA256:.* was not accepted"):
                await open_stream(node, "token", gate=gate(tmp_path), prompts=prompts)
        assert len(asked) == 1
        prompts.reconsider()
        with pytest.raises(PromptDeclined):
            await open_stream(node, "token", gate=gate(tmp_path), prompts=prompts)

    assert len(asked) == 2
    assert not (tmp_path / "our_known_hosts").exists()


@pytest.mark.ssh
async def test_a_changed_or_revoked_key_is_shown_with_what_is_known_and_nothing_to_accept(
    serve: Callable[..., Sshd], tmp_path: Path
) -> None:
    """Both fingerprints, file and line; there is no field, so there is no answer."""
    server = serve()
    other = make_key(tmp_path / "other")
    known = server.known_hosts_line()
    changed = f"# one\n[127.0.0.1]:{server.port} {' '.join(other.with_suffix('.pub').read_text().split()[:2])}\n"
    revoked = f"{known}\n@revoked * {known.split(' ', 1)[1]}\n"
    for text, words in ((changed, "has changed"), (revoked, "is revoked")):
        server.known_hosts.write_text(text)
        prompts = PromptQueue()
        with pytest.raises(HostKeyChanged, match=words) as stopped:
            await open_stream(server.node(), "token", gate=gate(tmp_path), prompts=prompts)

        assert prompts.current is not None
        stop = prompts.current.prompt
        assert (stop.title, stop.fields) == ("gpu-1: stopped", ())
        assert server.fingerprint() in stop.lines
        assert any(entry.endswith(f" in {server.known_hosts}:2") for entry in stop.lines), stop.lines
        assert f"{server.known_hosts}:2" in str(stopped.value)


@pytest.mark.ssh
async def test_a_bastion_is_asked_about_once_for_all_nodes_behind_it(
    serve: Callable[..., Sshd], tmp_path: Path
) -> None:
    """By its own name, and one of those that it is for."""
    bastion, target = serve(), serve()
    bastion.known_hosts.unlink()
    hop = bastion.node("outer")
    shared = gate(tmp_path)
    nodes = [target.node(f"gpu-{index}", jump=("outer",), hops=(hop,)) for index in range(4)]
    async with operator(typed("yes")) as (prompts, asked):
        for stream in await asyncio.gather(
            *(open_stream(node, "token", gate=shared, prompts=prompts) for node in nodes)
        ):
            await stream.close()

    (title,) = titles(asked)
    assert title.startswith("outer, on the way to gpu-")
    assert (bastion.logins(), target.logins()) == (1, 4)


@pytest.mark.ssh
@pytest.mark.parametrize("has_public_half", [True, False])
async def test_an_encrypted_key_is_asked_about_once_for_a_whole_fleet(
    serve: Callable[..., Sshd], tmp_path: Path, has_public_half: bool
) -> None:
    """Wrong, asked again, right: for every login of this console, also the next one."""
    server = serve(options=("MaxStartups 100",))
    locked = make_key(tmp_path / "locked", "open sesame")
    with (server.directory / "authorized_keys").open("a") as file:
        file.write(locked.with_suffix(".pub").read_text())
    if not has_public_half:
        locked.with_suffix(".pub").unlink()
    shared = gate(tmp_path)
    nodes = [server.node(f"gpu-{index}", identity=(str(locked),)) for index in range(CONNECT_LIMIT + 4)]
    async with operator(typed("wrong", "open sesame")) as (prompts, asked):
        for stream in await asyncio.gather(
            *(open_stream(node, "token", gate=shared, prompts=prompts) for node in nodes)
        ):
            await stream.close()
        await (await open_stream(nodes[0], "token", gate=shared, prompts=prompts)).close()

    assert titles(asked) == [f"{locked}: passphrase of the key"] * 2
    assert asked[1].problem == "The passphrase is wrong."
    assert server.logins() == len(nodes) + 1


@pytest.mark.ssh
async def test_a_passphrase_is_asked_for_three_times_and_only_where_the_key_would_do(
    serve: Callable[..., Sshd], tmp_path: Path
) -> None:
    """A key that the server does not want is not opened; after three wrong ones nobody is asked until reconnect."""
    server = serve()
    locked = make_key(tmp_path / "locked", "open sesame")
    node = server.node(identity=(str(locked),))
    shared = gate(tmp_path)
    async with operator(typed("wrong")) as (prompts, asked):
        with pytest.raises(AuthenticationFailed):
            await open_stream(node, "token", gate=shared, prompts=prompts)
        assert asked == []
        (server.directory / "authorized_keys").write_text(locked.with_suffix(".pub").read_text())
        for _ in range(2):
            with pytest.raises(PromptDeclined, match="locked: its passphrase was wrong 3 times"):
                await open_stream(node, "token", gate=shared, prompts=prompts)

    assert len(asked) == 3


async def test_a_password_is_asked_for_by_our_name_and_the_server_s_words_stand_apart(tmp_path: Path) -> None:
    """The banner, cleaned and cut; a wrong one is asked for again, three times in all."""
    banner = "Welcome \x1b[2J\u202eops\n" * 100
    async with asking_server(tmp_path, password="right", banner=banner) as (server, node):
        async with operator(typed("wrong", "right")) as (prompts, asked):
            await (await open_stream(node, "token", gate=gate(tmp_path), prompts=prompts)).close()
        assert server.given == ["wrong", "right"]
        first, second = asked
        assert (first.title, first.lines[0]) == ("gpu-1: password", f"of ops at 127.0.0.1 port {node.port}")
        assert (first.fields[0].label, first.fields[0].is_secret, first.fields[0].is_theirs) == (
            "Password",
            True,
            False,
        )
        assert len(first.theirs) <= 12
        assert "\x1b" not in "".join(first.theirs)
        assert (first.problem, second.problem) == ("", "The password was not accepted.")

        async with operator(typed("wrong")) as (prompts, asked):
            with pytest.raises(AuthenticationFailed, match=r"did not let ops in"):
                await open_stream(node, "token", gate=gate(tmp_path), prompts=prompts)
        assert len(asked) == 3


async def test_a_second_factor_is_asked_for_round_by_round(tmp_path: Path) -> None:
    """Names, instructions and prompts are the server's; what may be seen while it is typed is seen."""
    rounds = [
        ("Login", "Two steps.", [("User token: ", False), ("Site: ", True)]),
        ("", "It was sent.", []),
        ("", "", [("Code\x1b]0;x\x07: ", True)]),
    ]
    answers = [["abc", "berlin"], [], ["123456"]]
    typed_by_label = {"User token:": "abc", "Site:": "berlin", "Code:": "123456"}
    async with (
        asking_server(tmp_path, rounds=rounds, answers=answers) as (server, node),
        operator(lambda prompt: [typed_by_label[field.label] for field in prompt.fields]) as (prompts, asked),
    ):
        await (await open_stream(node, "token", gate=gate(tmp_path), prompts=prompts)).close()

    assert server.given == [tuple(each) for each in answers]
    assert titles(asked) == ["gpu-1: the server asks"] * 2
    assert asked[0].theirs == ("Login", "Two steps.")
    assert asked[1].theirs == ("It was sent.",)
    assert [(field.is_secret, field.is_theirs) for field in asked[0].fields] == [(True, True), (False, True)]


async def test_a_declined_question_ends_the_login_and_asks_for_nothing_else(tmp_path: Path) -> None:
    """Not the password after the second factor; not again, until somebody reconnects."""
    rounds = [("", "", [("Code: ", False)])]
    async with (
        asking_server(tmp_path, password="right", rounds=rounds, answers=[["1"]]) as (server, node),
        operator(lambda _: None) as (prompts, asked),
    ):
        for _ in range(2):
            with pytest.raises(PromptDeclined, match="gpu-1: the server asks: it was asked for and not given") as error:
                await open_stream(node, "token", gate=gate(tmp_path), prompts=prompts)
            assert error.value.final

    assert len(asked) == 1
    assert server.given == []


async def test_a_connection_that_goes_away_withdraws_its_question(tmp_path: Path) -> None:
    """The node is out of reach then, which a retry may mend, and no question is left."""
    async with asking_server(tmp_path, password="right") as (server, node):
        prompts = PromptQueue()
        opening = asyncio.ensure_future(open_stream(node, "token", gate=gate(tmp_path), prompts=prompts))
        await soon(lambda: prompts.waiting == 1, "asked")
        server.connections[-1].abort()

        with pytest.raises(NodeUnreachable, match="did not wait for the answer to its question"):
            await opening

    assert prompts.current is None


async def test_places_are_free_while_somebody_is_asked(tmp_path: Path) -> None:
    """More questions than places wait at once, so that a node that asks nothing can connect."""
    async with asking_server(tmp_path, password="right") as (_, node):
        prompts, shared = PromptQueue(), gate(tmp_path)
        openings = [
            asyncio.ensure_future(open_stream(node, "token", gate=shared, prompts=prompts))
            for _ in range(CONNECT_LIMIT + 2)
        ]
        await soon(lambda: prompts.waiting == len(openings), "all are asked")
        assert not shared.connects.locked()
        while (current := prompts.current) is not None:
            prompts.answer(current, ["right"])
        for stream in await asyncio.gather(*openings):
            await stream.close()


@pytest.mark.parametrize("asks", ["a password", "answers to questions of its own"])
async def test_without_a_screen_the_error_says_what_was_asked(tmp_path: Path, asks: str) -> None:
    """At once, with the way out."""
    rounds = [("", "", [("Code: ", False)])] if asks != "a password" else []
    password = "x" if asks == "a password" else None
    async with asking_server(tmp_path, password=password, rounds=rounds) as (server, node):
        with pytest.raises(AuthenticationFailed) as failed:
            await open_stream(node, "token", gate=gate(tmp_path))

    assert f"gpu-1 (127.0.0.1 port {node.port}) did not let ops in" in str(failed.value)
    assert f"it takes {asks}, which only the console (`glowplug`) asks for" in str(failed.value)
    assert server.given == []


@pytest.mark.ssh
async def test_without_a_screen_an_unknown_host_key_says_how_it_is_accepted(
    serve: Callable[..., Sshd], tmp_path: Path
) -> None:
    """The console, or ssh once where its own file counts."""
    server = serve()
    plain = dataclasses.replace(server.node(), known_hosts=())
    with pytest.raises(
        HostKeyUnknown, match=rf"{re.escape(server.fingerprint())}; open the console .* or `ssh -p \d+ .*`"
    ):
        await open_stream(plain, "token", gate=gate(tmp_path))
    server.known_hosts.write_text("")
    with pytest.raises(HostKeyUnknown, match=r"; open the console \(`glowplug`\) once to accept it"):
        await open_stream(server.node(), "token", gate=gate(tmp_path))


@pytest.mark.ssh
def test_a_verb_asks_nobody_and_names_node_question_and_way_out(
    serve: Callable[..., Sshd], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 3, at once."""
    server = serve()
    locked = make_key(tmp_path / "locked", "open sesame")
    where = f'host = "127.0.0.1"\nport = {server.port}\n'
    (tmp_path / "fleet.toml").write_text(
        f'[nodes.new]\n{where}identity = "{server.user_key}"\n'
        f'[nodes.shut]\n{where}identity = "{locked}"\nknown_hosts = "{server.known_hosts}"\n'
    )
    for name, file in (("CONFIG", "fleet.toml"), ("HISTORY", "history.db"), ("LOG", "log"), ("STATE", "state")):
        monkeypatch.setenv(f"GLOWPLUG_{name}", str(tmp_path / file))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)

    assert run(["probe", "new", "shut"]) == 3
    told = capsys.readouterr()
    lines = {line.partition(":")[0]: line for line in (told.err + told.out).splitlines()}
    assert f"is not known: ED25519 {server.fingerprint()}; open the console (`glowplug`) or `ssh -p" in lines["new"]
    assert f"{locked} is encrypted: add it to ssh-agent" in lines["shut"]


@pytest.mark.ssh
async def test_an_encrypted_key_signs_with_its_certificate(serve: Callable[..., Sshd], tmp_path: Path) -> None:
    """Where the key alone does not let anybody in."""
    authority, locked = make_key(tmp_path / "ca"), make_key(tmp_path / "locked", "open sesame")
    server = serve(options=(f"TrustedUserCAKeys {authority}.pub",))
    sign(authority, locked, "-n", getpass.getuser())
    async with operator(typed("open sesame")) as (prompts, asked):
        node = server.node(identity=(str(locked),))
        await (await open_stream(node, "token", gate=gate(tmp_path), prompts=prompts)).close()

    assert len(asked) == 1
    assert "ED25519-CERT" in server.log.read_text()
