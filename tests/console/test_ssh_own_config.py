"""Nodes that the user's own ssh configuration resolves, against real servers where one is needed."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from console.errors import (
    HostKeyChanged,
    NodeMisconfigured,
)
from console.transports import Gate, open_stream, ssh_oracle
from console.transports.ssh_target import resolve
from tests.console.links import connected, linked, soon
from tests.console.sshd import Sshd, make_key, script, servers
from tests.needs import need


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Sshd]]:
    with servers(tmp_path) as start:
        yield start


def own_ssh(directory: Path, config: str) -> Gate:
    """A gate whose ``ssh -G`` reads this configuration in place of the user's."""
    (directory / "ssh_config").write_text(config)
    need("ssh", "openssh-client")
    wrapper = script(directory, f'#!/bin/sh\nexec ssh -F "{directory}/ssh_config" "$@"\n', "ssh")
    return Gate(directory / "our_known_hosts", home=directory, ssh=wrapper)


async def test_an_alias_gets_everything_from_ssh_s_own_configuration(
    serve: Callable[..., Sshd], tmp_path: Path
) -> None:
    """Host, port, identity, known_hosts and the jump of an alias come from `ssh -G`; it connects through them."""
    bastion, target = serve(), serve()
    config = "".join(
        f"Host {name}\n HostName 127.0.0.1\n Port {server.port}\n IdentityFile {server.directory}/user_key\n"
        f" UserKnownHostsFile {server.known_hosts}\n StrictHostKeyChecking no\n{extra}"
        for name, server, extra in (("gpu-1", target, " ProxyJump edge\n"), ("edge", bastion, ""))
    )
    node = dataclasses.replace(target.node(), host=None, port=None, identity=(), known_hosts=())
    async with linked(node, tmp_path, gate=own_ssh(tmp_path, config)) as (_, kept):
        await soon(connected(kept), "connected")

    assert (bastion.logins(), target.logins()) == (1, 1)


async def test_ssh_s_configuration_can_not_switch_host_key_checking_off(
    serve: Callable[..., Sshd], tmp_path: Path
) -> None:
    """With `UserKnownHostsFile none` and `StrictHostKeyChecking no` a new key is taken, and then no other."""
    server = serve()
    config = "Host *\n StrictHostKeyChecking no\n UserKnownHostsFile none\n GlobalKnownHostsFile /dev/null\n"
    node = dataclasses.replace(server.node(), known_hosts=(), ssh_config=True)
    shared = own_ssh(tmp_path, config)
    await (await open_stream(node, "token", gate=shared)).close()
    assert shared.known_hosts_file.read_text() == f"{server.known_hosts_line()}\n"
    server.stop()
    make_key(tmp_path / "other").replace(server.host_key)
    server.start()

    with pytest.raises(HostKeyChanged, match="has changed"):
        await open_stream(node, "token", gate=shared)


async def test_jumps_resolve_as_openssh_resolves_them(tmp_path: Path) -> None:
    """Include, Match, nested and listed jumps, each hop by its own block."""
    (tmp_path / "sites.conf").write_text(
        "Host gpu-*\n  User ops\n  ProxyJump jump2\nHost jump2\n  HostName jump2.example\n  ProxyJump jump1\n"
        "Host jump1\n  HostName 192.0.2.1\n  Port 2222\n"
    )
    config = (
        f"Include {tmp_path}/sites.conf\nMatch originalhost gpu-7\n  Port 7022\n"
        "Host multi\n  ProxyJump jump1,me@jump2:2200\n"
    )
    ssh = own_ssh(tmp_path, config)
    plain = Sshd(tmp_path / "none").node()

    async def way(name: str) -> list[tuple[str, int]]:
        node = dataclasses.replace(plain, name=name, host=None, port=None)
        return [(target.host, target.port) for target in await resolve(node, ssh)]

    assert await way("gpu-1") == [("192.0.2.1", 2222), ("jump2.example", 22), ("gpu-1", 22)]
    assert (await way("gpu-7"))[-1] == ("gpu-7", 7022)
    assert await way("multi") == [("192.0.2.1", 2222), ("jump2.example", 2200), ("multi", 22)]


async def test_jumps_in_a_circle_are_refused(tmp_path: Path) -> None:
    """Two hosts that jump through each other end in an error, not in a loop."""
    ssh = own_ssh(tmp_path, "Host a\n ProxyJump b\nHost b\n ProxyJump a\n")
    node = dataclasses.replace(Sshd(tmp_path / "none").node(), name="a", host=None, port=None)

    with pytest.raises(NodeMisconfigured, match="circle"):
        await resolve(node, ssh)


async def test_without_an_ssh_binary_the_plain_values_stand(tmp_path: Path) -> None:
    """No `ssh` here: an alias is a host name, the port 22, files where they usually are."""
    node = dataclasses.replace(Sshd(tmp_path / "none").node(), host=None, port=None, user=None, known_hosts=())
    (target,) = await resolve(node, Gate(tmp_path / "ours", home=tmp_path, account_home=tmp_path, ssh="no-such-ssh"))

    assert (target.host, target.port) == ("gpu-1", 22)
    assert target.known_hosts[0] == tmp_path / ".ssh/known_hosts"
    assert target.known_hosts[-1] == tmp_path / "ours"


async def test_an_ssh_that_does_not_answer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ssh -G` may run a Match exec that hangs; it is ended, and the node says so."""
    monkeypatch.setattr(ssh_oracle, "ORACLE_TIMEOUT_S", 0.2)
    hung = script(tmp_path, "#!/bin/sh\nexec sleep 1000\n", "ssh")
    node = dataclasses.replace(Sshd(tmp_path / "none").node(), host=None)

    with pytest.raises(NodeMisconfigured, match=r"`ssh -G` did not answer within 0\.2 s"):
        async with asyncio.timeout(30):
            await resolve(node, Gate(tmp_path / "ours", home=tmp_path, ssh=hung))
