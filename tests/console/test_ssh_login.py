"""Logins to a real OpenSSH server as ssh's own configuration says: keys of hosts and users, agents, proxies, hops."""

from __future__ import annotations

import dataclasses
import getpass
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from console.errors import (
    AuthenticationFailed,
    HostKeyChanged,
    HostKeyUnknown,
    LinkError,
    NodeMisconfigured,
    NodeUnreachable,
)
from console.prompts import PromptQueue
from console.transports import ssh_algorithms
from console.transports.ssh import SshStream, open_ssh
from tests.console.links import gate, soon
from tests.console.sshd import Sshd, make_key, sign, ssh_keygen, until
from tests.needs import need

pytestmark = pytest.mark.ssh

NETCAT = """\
import os, select, socket, sys
link = socket.create_connection((sys.argv[1], int(sys.argv[2])))
while True:
    for end in select.select([0, link], [], [])[0]:
        data = os.read(0, 65536) if end == 0 else link.recv(65536)
        if not data:
            sys.exit(0)
        link.sendall(data) if end == 0 else os.write(1, data)
"""


class Site:
    """Servers, and the configuration of ssh by which they are reached."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.servers = directory, list[Sshd]()
        self.config = directory / "ssh_config"
        self.gate = gate(directory)

    def serve(self, *lines: str, prepare: Callable[[Sshd], tuple[str, ...]] = lambda _: ()) -> Sshd:
        """Start a server; ``prepare`` may make files of its keys and returns lines for its configuration."""
        server = Sshd(self.directory / f"sshd-{len(self.servers)}")
        self.servers.append(server)
        with (server.directory / "sshd_config").open("a") as file:
            file.writelines(f"{line}\n" for line in (*prepare(server), *lines))
        return server.start()

    def block(self, server: Sshd, *lines: str, name: str = "gpu-1") -> str:
        """Return a Host block for ``server``; a line of it stands before those that every server needs."""
        usual = (
            "HostName 127.0.0.1", f"Port {server.port}", f"IdentityFile {server.user_key}",
            f"UserKnownHostsFile {server.known_hosts}", "GlobalKnownHostsFile none",
        )  # fmt: skip
        return f"Host {name}\n" + "".join(f"  {line}\n" for line in (*lines, *usual))

    async def log_in(
        self, config: str, server: Sshd, *, name: str = "gpu-1", say: Callable[[str], None] | None = None
    ) -> SshStream:
        self.config.write_text(config)
        node = server.node(name, host=None, port=None, identity=(), known_hosts=(), ssh_config=str(self.config))
        return await open_ssh(dataclasses.replace(node, connect_timeout_s=10.0), "token", self.gate, say=say)

    async def try_(self, config: str, server: Sshd, **options: Any) -> None:
        await (await self.log_in(config, server, **options)).close()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A site without servers; those that a test starts end with it."""
    need("ssh", "openssh-client")
    made = Site(tmp_path)
    yield made
    for server in made.servers:
        server.stop()


def hash_names(known_hosts: Path) -> None:
    argv = [ssh_keygen(), "-q", "-H", "-f", str(known_hosts)]
    subprocess.run(argv, check=True, capture_output=True, timeout=30)


def find(name: str, known_hosts: Path) -> str:
    argv = [ssh_keygen(), "-F", name, "-f", str(known_hosts)]
    return subprocess.run(argv, check=True, capture_output=True, text=True, timeout=30).stdout


def public(key: Path) -> str:
    return " ".join(Path(f"{key}.pub").read_text().split()[:2])


async def test_a_certificate_logs_in_where_its_key_alone_does_not(site: Site) -> None:
    """By CertificateFile, and by its name beside the key."""
    authority, key = make_key(site.directory / "ca"), make_key(site.directory / "me")
    server = site.serve(f"TrustedUserCAKeys {authority}.pub")
    beside = sign(authority, key, "-n", getpass.getuser())
    elsewhere = beside.rename(site.directory / "elsewhere.pub")
    only = ("IdentitiesOnly yes", f"IdentityFile {key}")
    block = site.block(server, *only).replace(f"  IdentityFile {server.user_key}\n", "")

    with pytest.raises(AuthenticationFailed):
        await site.try_(block, server)
    await site.try_(f"{block}  CertificateFile {elsewhere}\n", server)
    elsewhere.rename(beside)
    await site.try_(block, server)

    assert server.log.read_text().count("ED25519-CERT") >= 2


def certified(site: Site, *options: str) -> tuple[Sshd, Path]:
    """Start a server with a host certificate; the authority's key comes with it."""
    authority = make_key(site.directory / "ca")
    server = site.serve(
        prepare=lambda made: (f"HostCertificate {sign(authority, made.host_key, '-h', *options)}",),
    )
    return server, authority


async def test_an_authority_vouches_for_a_host_by_its_name(site: Site) -> None:
    """The certificate's names count, an alias in place of the address; another authority is none."""
    server, authority = certified(site, "-n", "pool")
    server.known_hosts.write_text(f"@cert-authority pool,127.*,[127.*]:* {public(authority)}\n")
    await site.try_(site.block(server, "HostKeyAlias pool"), server)
    with pytest.raises(HostKeyChanged, match="can't be trusted"):
        await site.try_(site.block(server), server)

    server.known_hosts.write_text(f"@cert-authority pool {public(make_key(site.directory / 'other'))}\n")
    with pytest.raises(LinkError, match="not signed by the authority"):
        await site.try_(site.block(server, "HostKeyAlias pool"), server)


@pytest.mark.parametrize("what", ["authority", "key", "key by file"])
async def test_a_revocation_beats_an_authority(site: Site, what: str) -> None:
    """Of the authority, of the key that it signed, in known_hosts or in RevokedHostKeys."""
    server, authority = certified(site, "-n", "pool")
    revoked = public(authority if what == "authority" else server.host_key)
    line = f"@cert-authority * {public(authority)}\n"
    server.known_hosts.write_text(line if what == "key by file" else f"{line}@revoked * {revoked}\n")
    (site.directory / "revoked").write_text(f"# gone\n{revoked}\n")
    file = ("RevokedHostKeys ~/revoked",) if what == "key by file" else ()

    with pytest.raises(HostKeyChanged, match="revoked"):
        await site.try_(site.block(server, "HostKeyAlias pool", *file), server)


async def test_revoked_host_keys_are_refused_where_the_key_is_known(site: Site) -> None:
    """And a file that can't be read, or holds what can't, refuses all."""
    server, revoked = site.serve(), site.directory / "revoked"
    block = site.block(server, f"RevokedHostKeys {revoked}")
    with pytest.raises(NodeMisconfigured, match=r"RevokedHostKeys .*: No such file"):
        await site.try_(block, server)
    for text, words in ((b"SSHKRL\n\0\0", "binary revocation list"), (b"\nnonsense\n", "revoked:2: ")):
        revoked.write_bytes(text)
        with pytest.raises(NodeMisconfigured, match=words):
            await site.try_(block, server)
    revoked.write_text(public(site.servers[0].user_key))
    await site.try_(block, server)

    revoked.write_text(public(server.host_key))
    with pytest.raises(HostKeyChanged, match="is revoked"):
        await site.try_(block, server)


async def test_hashed_names_and_an_alias_are_found(site: Site) -> None:
    """What ``ssh-keygen -H`` leaves of a file, and names in another case."""
    server = site.serve()
    server.known_hosts.write_text(f"{server.known_hosts_line()}\nPool {public(server.host_key)}\n")
    await site.try_(site.block(server, "HostKeyAlias pool"), server)
    server.known_hosts.write_text(f"{server.known_hosts_line()}\npool {public(server.host_key)}\n")
    hash_names(server.known_hosts)

    assert server.known_hosts.read_text().count("|1|") == 2
    await site.try_(site.block(server), server)
    await site.try_(site.block(server, "HostKeyAlias Pool"), server)


async def test_the_key_that_is_known_is_asked_for_among_a_server_s_keys(site: Site) -> None:
    """A second host key is no changed one; HostKeyAlgorithms of the user's come first."""

    def second(server: Sshd) -> tuple[str, ...]:
        argv = [ssh_keygen(), "-q", "-t", "ecdsa", "-N", "", "-f", str(server.directory / "second")]
        subprocess.run(argv, check=True, timeout=30)
        return (f"HostKey {server.directory}/second",)

    server = site.serve(prepare=second)
    server.known_hosts.write_text(f"[127.0.0.1]:{server.port} {public(server.directory / 'second')}\n")
    await site.try_(site.block(server), server)

    with pytest.raises(HostKeyChanged, match="has changed"):
        await site.try_(site.block(server, "HostKeyAlgorithms ssh-ed25519"), server)


async def test_what_a_strict_configuration_asks_for_is_kept(site: Site) -> None:
    """`yes` leaves nothing to accept; a small RSA key and another key of the address are refused."""

    def rsa(server: Sshd) -> tuple[str, ...]:
        argv = [ssh_keygen(), "-q", "-t", "rsa", "-b", "2048", "-N", "", "-f", str(server.directory / "rsa")]
        subprocess.run(argv, check=True, timeout=30)
        return (f"HostKey {server.directory}/rsa",)

    server = site.serve(prepare=rsa)
    known = server.known_hosts.read_text()
    server.known_hosts.write_text("")
    with pytest.raises(HostKeyUnknown):
        await site.try_(site.block(server, "StrictHostKeyChecking ask"), server)
    with pytest.raises(HostKeyChanged, match="is not known, and StrictHostKeyChecking is yes"):
        await site.try_(site.block(server, "StrictHostKeyChecking yes"), server)

    server.known_hosts.write_text(f"[127.0.0.1]:{server.port} {public(server.directory / 'rsa')}\n")
    await site.try_(site.block(server, "RequiredRSASize 2048"), server)
    with pytest.raises(HostKeyChanged, match="has 2048 bits, RequiredRSASize is 3072"):
        await site.try_(site.block(server, "RequiredRSASize 3072"), server)

    by_name = f"[localhost]:{server.port} {public(server.host_key)}\n"
    other = f"[127.0.0.1]:{server.port} {public(server.user_key)}\n"
    checked = site.block(server, "HostName localhost", "CheckHostIP yes", "AddressFamily inet")
    server.known_hosts.write_text(by_name + other)
    with pytest.raises(HostKeyChanged, match=r"is not the one known for its address 127\.0\.0\.1"):
        await site.try_(checked, server)
    server.known_hosts.write_text(by_name + known)
    await site.try_(checked, server)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Start an ssh-agent with these private keys; its socket."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*keys: Path) -> Path:
        path = tmp_path / f"agent-{len(started)}"
        argv = [need("ssh-agent", "openssh-client"), "-D", "-a", str(path)]
        started.append(subprocess.Popen(argv, stdout=subprocess.DEVNULL))
        until(path.exists, "the agent's socket")
        if keys:
            argv = [need("ssh-add", "openssh-client"), "-q", *map(str, keys)]
            subprocess.run(argv, env={**os.environ, "SSH_AUTH_SOCK": str(path)}, check=True, timeout=30)
        return path

    yield start
    for process in started:
        process.terminate()
        process.wait()


async def test_a_full_agent_does_not_use_up_the_tries(site: Site, agent: Callable[..., Path]) -> None:
    """The agent's key that a file names comes first, also by its public half alone; IdentitiesOnly leaves the rest."""
    server = site.serve("MaxAuthTries 2")
    strangers = [make_key(site.directory / f"stranger-{index}") for index in range(3)]
    path = agent(*strangers, server.user_key)
    (site.directory / "mine.pub").write_text(server.user_key.with_suffix(".pub").read_text())
    block = site.block(server, f"IdentityAgent {path}").replace(f"  IdentityFile {server.user_key}\n", "")

    with pytest.raises((AuthenticationFailed, NodeUnreachable)):
        await site.try_(f"{block}  IdentityFile {site.directory}/none-such\n", server)
    await site.try_(f"{block}  IdentityFile {site.directory}/mine.pub\n", server)
    await site.try_(f"{block}  IdentityFile {site.directory}/mine.pub\n  IdentitiesOnly yes\n", server)
    with pytest.raises(AuthenticationFailed):
        await site.try_(f"{block}  IdentityFile {strangers[0]}.pub\n  IdentitiesOnly yes\n", server)


async def test_an_agent_that_is_not_there_is_named_where_the_login_fails(site: Site) -> None:
    """Files go on without it."""
    server = site.serve()
    gone = f"IdentityAgent {site.directory}/gone"
    await site.try_(site.block(server, gone), server)
    stranger = make_key(site.directory / "stranger")
    block = site.block(server, gone, f"IdentityFile {stranger}").replace(f"  IdentityFile {server.user_key}\n", "")

    with pytest.raises(AuthenticationFailed, match=rf"with {stranger}; there is no ssh-agent at .*/gone"):
        await site.try_(block, server)


def netcat(site: Site) -> str:
    path = site.directory / "netcat.py"
    path.write_text(NETCAT)
    return f"{sys.executable} -S -E {path}"


async def test_a_proxy_command_carries_the_connection_and_ends_with_it(site: Site) -> None:
    """By the user's shell, its tokens filled in; megabytes go through, and no process is left."""
    server = site.serve()
    pid = site.directory / "pid"
    command = f'sh -c \'echo $$ >{pid}; echo noise >&2; exec {netcat(site)} "$0" "$1"\' %h %p'
    stream = await site.log_in(site.block(server, f"ProxyCommand {command}"), server)
    process = int(pid.read_text())
    assert Path(f"/proc/{process}").exists()
    await stream.close()

    await soon(lambda: not Path(f"/proc/{process}").exists(), "the command is gone")
    assert server.logins() == 1


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("echo no route >&2; exit 3", "its ProxyCommand ended with 3: no route"),
        ("no-such-program %h", "its ProxyCommand ended with 127: .*not found"),
        ("sleep 1000", "gave no SSH login within 1 s"),
    ],
)
async def test_a_proxy_command_that_fails_says_why(site: Site, command: str, words: str) -> None:
    """What it wrote to stderr and how it ended; one that says nothing costs the time-out."""
    server = site.serve()
    run = command.replace("echo", "sh -c 'echo", 1) + ("'" if "echo" in command else "")

    with pytest.raises(NodeUnreachable, match=words):
        await site.try_(site.block(server, f"ProxyCommand {run}", "ConnectTimeout 1"), server)


async def test_two_hops_each_by_its_own_block(site: Site) -> None:
    """The first one's ProxyCommand, the second's alias, the node's certificate authority."""
    target, authority = certified(site, "-n", "gpu")
    target.known_hosts.write_text(f"@cert-authority gpu {public(authority)}\n")
    outer, inner = site.serve(), site.serve()
    inner.known_hosts.write_text(f"inner {public(inner.host_key)}\n")
    config = (
        site.block(target, "HostKeyAlias gpu", "ProxyJump outer,inner")
        + site.block(outer, f"ProxyCommand {netcat(site)} %h %p", name="outer")
        + site.block(inner, "HostKeyAlias inner", "ProxyJump nowhere", name="inner")
    )
    await site.try_(config, target)

    assert [server.logins() for server in (outer, inner, target)] == [1, 1, 1]
    await soon(lambda: not outer.connection_processes() and not inner.connection_processes(), "bastions let go")


async def test_algorithms_and_addresses_are_the_ones_that_were_set(site: Site) -> None:
    """The cipher and code of the connection, and where it comes from."""
    server = site.serve("LogLevel VERBOSE")
    lines = (
        "Ciphers aes256-ctr", "MACs hmac-sha2-512", "KexAlgorithms curve25519-sha256", "BindAddress 127.0.0.2",
        "AddressFamily inet", "PubkeyAcceptedAlgorithms ssh-ed25519*",
    )  # fmt: skip
    stream = await site.log_in(site.block(server, *lines), server)
    used = stream._connection.get_extra_info("send_cipher"), stream._connection.get_extra_info("send_mac")
    await stream.close()

    assert used == ("aes256-ctr", "hmac-sha2-512")
    assert "Connection from 127.0.0.2" in server.log.read_text()


async def test_an_algorithm_that_can_not_be_used_is_said_and_never_replaced(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several, the others serve; where none is left the node is refused."""
    monkeypatch.setitem(ssh_algorithms._ABLE, "ciphers", lambda: [b"aes256-ctr"])
    server, said = site.serve(), list[str]()
    await site.try_(site.block(server, "Ciphers aes128-ctr,aes256-ctr"), server, say=said.append)

    assert said == ["gpu-1: Ciphers: aes128-ctr can't be used here"]
    with pytest.raises(NodeMisconfigured, match="gpu-1: none of the Ciphers of ssh's configuration can be used here"):
        await site.try_(site.block(server, "Ciphers aes128-ctr"), server)


async def test_what_is_not_followed_is_said_once(site: Site) -> None:
    """By the node's name, whoever links again."""
    server, said = site.serve(), list[str]()
    block = site.block(server, "VerifyHostKeyDNS yes", "ForwardAgent yes", "ControlMaster auto")
    for _ in range(2):
        await site.try_(block, server, say=said.append)

    assert said == ["gpu-1: VerifyHostKeyDNS is not followed: a key from DNS does not vouch for a host"]


async def test_a_new_host_key_is_taken_where_ssh_would_take_it(site: Site) -> None:
    """With accept-new: into our own file, its name hashed if HashKnownHosts says so; it is said, and ssh finds it."""
    server, said = site.serve(), list[str]()
    server.known_hosts.unlink()
    block = site.block(server, "StrictHostKeyChecking accept-new", "HashKnownHosts yes")
    for _ in range(2):
        await site.try_(block, server, say=said.append)

    ours = site.gate.known_hosts_file
    assert said == [f"gpu-1: took the host key ED25519 {server.fingerprint()}, as StrictHostKeyChecking says"]
    assert ours.read_text().startswith("|1|")
    assert len(ours.read_text().splitlines()) == 1
    assert public(server.host_key) in find(f"[127.0.0.1]:{server.port}", ours)


async def test_batch_mode_asks_nobody(site: Site) -> None:
    """Where somebody could be asked, too."""
    server, prompts = site.serve(), PromptQueue()
    server.known_hosts.unlink()
    site.config.write_text(site.block(server, "BatchMode yes"))
    node = server.node(host=None, port=None, identity=(), known_hosts=(), ssh_config=str(site.config))

    with pytest.raises(HostKeyUnknown):
        await open_ssh(node, "token", site.gate, prompts)
