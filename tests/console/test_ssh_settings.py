"""What a host's settings become, asked of the real ``ssh -G``: followed, said, or refused."""

from __future__ import annotations

import dataclasses
import getpass
import os
import socket
from pathlib import Path

import pytest

from console.config_nodes import Node
from console.errors import NodeMisconfigured
from console.transports import Gate
from console.transports.ssh_settings import (
    METHODS,
    NewHostKeys,
    Refused,
    SshSettings,
    expand,
    read_settings,
    split_files,
)
from console.transports.ssh_target import Target, resolve
from tests.console.links import gate
from tests.needs import need


async def way(
    directory: Path, config: str, name: str = "gpu-1", shared: Gate | None = None, **node: object
) -> list[Target]:
    """Return the way to ``name`` under this configuration, by the ssh that is installed."""
    need("ssh", "openssh-client")
    file = directory / "ssh_config"
    file.write_text(config)
    settings: dict[str, object] = {"ssh_config": str(file), **node}
    return list(await resolve(dataclasses.replace(Node(name), **settings), shared or gate(directory)))  # type: ignore[arg-type]


async def one(directory: Path, config: str, name: str = "gpu-1", **node: object) -> Target:
    (target,) = await way(directory, config, name, **node)
    return target


@pytest.mark.parametrize(
    ("config", "name", "expected"),
    [
        ("Host gpu-*\n Port 1\n", "gpu-1", {"port": 1}),
        ("Host * !gpu-1\n Port 1\nHost *\n Port 2\n", "gpu-1", {"port": 2}),
        ("Host * !gpu-1\n Port 1\nHost *\n Port 2\n", "gpu-2", {"port": 1}),
        ("Port 1\nPort 2\n", "gpu-1", {"port": 1}),
        ("Host gpu-1\n HostName %h.example\n User ops\n", "gpu-1", {"host": "gpu-1.example", "user": "ops"}),
        ("Host gpu-1\n HostName UPPER.Example\n", "gpu-1", {"host": "upper.example"}),
        ("Match host gpu-1\n Port 3\n", "gpu-1", {"port": 3}),
        ("Match user ops\n Port 3\n", "gpu-1", {"port": 22}),
        ("Match originalhost gpu-1 exec \"test %h = gpu-1\"\n Port 4\n", "gpu-1", {"port": 4}),
        ("Match exec false\n Port 4\n", "gpu-1", {"port": 22}),
        ("Host gpu-1\n HostName real\nMatch final host real\n Port 5\n", "gpu-1", {"port": 5}),
        ("Include DIRECTORY/more-*.conf\n", "gpu-1", {"port": 6}),
        ("Host other\n Include DIRECTORY/more-*.conf\n", "gpu-1", {"port": 22}),
        ("HostKeyAlias pool\n", "gpu-1", {"host_key_alias": "pool"}),
        ("ConnectTimeout 3\n", "gpu-1", {"connect_timeout_s": 3.0}),
        ("ConnectTimeout 5m\n", "gpu-1", {"connect_timeout_s": 20.0}),
    ],
)  # fmt: skip
async def test_a_host_is_what_ssh_makes_of_it(
    tmp_path: Path, config: str, name: str, expected: dict[str, object]
) -> None:
    """Patterns with negation, Match by host, user, program and final, Include, the first value wins."""
    (tmp_path / "more-1.conf").write_text("Host gpu-1\n Port 6\n")
    target = await one(tmp_path, config.replace("DIRECTORY", str(tmp_path)), name)

    assert {key: getattr(target, key) for key in expected} == expected


async def test_the_fleet_s_user_and_port_are_ssh_s_own_options(tmp_path: Path) -> None:
    """A Match on the user sees the one that the login will be made with."""
    config = "Match user ops\n HostKeyAlias pool\nHost *\n User other\n Port 7\n"
    target = await one(tmp_path, config, user="ops", port=2222)

    assert (target.user, target.port, target.host_key_alias) == ("ops", 2222, "pool")


async def test_a_host_of_the_fleet_s_may_be_an_alias(tmp_path: Path) -> None:
    """Where ssh is asked about ``host`` its HostName is where the connection goes; without one ``host`` itself."""
    config = "Host inner\n HostName %h.cluster.example\n Port 2222\nHost 192.0.2.*\n User ops\n"
    alias = await one(tmp_path, config, host="inner")
    address = await one(tmp_path, config, host="192.0.2.7")

    assert (alias.label, alias.host, alias.port) == ("gpu-1", "inner.cluster.example", 2222)
    assert (address.host, address.user) == ("192.0.2.7", "ops")


async def test_key_files_come_in_order_with_their_tokens_filled_in(tmp_path: Path) -> None:
    """``ssh -G`` leaves these to the login: home, host, alias, port, users, ids and local names."""
    names = {
        "~/plain": "plain", "%d/h-%h": "h-real", "%d/n-%n": "n-gpu-1", "%d/p-%p": "p-2200", "%d/r-%r": "r-ops",
        "%d/u-%u": f"u-{getpass.getuser()}", "%d/i-%i": f"i-{os.getuid()}", "%d/k-%k": "k-pool", "%d/%%": "%",
        "%d/l-%l": f"l-{socket.gethostname()}", "%d/L-%L": f"L-{socket.gethostname().split('.')[0]}",
        '"~/a b"': "a b", "${KEYS}/c": "keys/c",
    }  # fmt: skip
    (tmp_path / "keys").mkdir()
    for name in names.values():
        (tmp_path / name).touch()
    lines = "".join(f" IdentityFile {name}\n" for name in names)
    config = (
        f"Host gpu-1\n HostName real\n User ops\n Port 2200\n HostKeyAlias pool\n{lines} IdentityFile %C\n"
        " CertificateFile ~/c-%r.pub\n"
    )
    shared = dataclasses.replace(gate(tmp_path), environ={**os.environ, "KEYS": str(tmp_path / "keys")})
    (target,) = await way(tmp_path, config, shared=shared)

    assert target.identities == tuple(tmp_path / name for name in names.values())
    assert not target.named_identities
    assert target.certificates == (tmp_path / "c-ops.pub",)
    assert target.notes == ("a key file is passed over: '%C': %C can't be filled in here",)


@pytest.mark.parametrize(
    ("line", "socket_path"),
    [
        ("", "/run/agent"),
        ("IdentityAgent SSH_AUTH_SOCK", "/run/agent"),
        ("IdentityAgent none", None),
        ("IdentityAgent /run/a-%r", "/run/a-ops"),
        ('IdentityAgent "/run/a b"', "/run/a b"),
        ("IdentityAgent $OTHER", "/run/other"),
        ("IdentityAgent ${OTHER}", "/run/other"),
        ("IdentityAgent $NOT_THERE", None),
    ],
)
async def test_the_agent_is_the_one_that_is_named(tmp_path: Path, line: str, socket_path: str | None) -> None:
    """A path, none, the usual variable, another one."""
    environ = {**os.environ, "OTHER": "/run/other"}
    shared = dataclasses.replace(gate(tmp_path), agent_socket="/run/agent", environ=environ)
    (target,) = await way(tmp_path, f"User ops\n{line}\n", shared=shared)

    assert target.agent_socket == socket_path


async def test_known_hosts_files_are_ssh_s_and_ours(tmp_path: Path) -> None:
    """Several of each, tokens, spaces in a name; a list of none leaves the others, and says so."""
    several = f'UserKnownHostsFile {tmp_path}/k-%h "{tmp_path}/k h"\nGlobalKnownHostsFile /etc/a /etc/b\n'
    nothing = "UserKnownHostsFile /dev/null\nGlobalKnownHostsFile none\n"
    ours = tmp_path / "our_known_hosts"
    target = await one(tmp_path, nothing)

    assert (await one(tmp_path, several)).known_hosts == (
        tmp_path / "k-gpu-1", tmp_path / "k h", Path("/etc/a"), Path("/etc/b"), ours,
    )  # fmt: skip
    assert target.known_hosts == (ours,)
    assert "UserKnownHostsFile names no file" in target.notes[0]


async def test_jumps_are_asked_about_one_by_one(tmp_path: Path) -> None:
    """Users, ports, IPv6, a URI, tokens; the first hop's own jumps and proxy are followed, a later hop's are not."""
    config = (
        "Host gpu-1\n ProxyJump me@edge:2200,[::1]:2201,%n-inner\nHost edge\n HostName edge.example\n ProxyJump outer\n"
        "Host outer\n ProxyCommand nc %h %p\nHost gpu-1-inner\n User in\n ProxyJump nowhere\n"
        "Host gpu-2\n ProxyJump ssh://u@outer:1\nHost gpu-3\n ProxyJump none\n"
    )  # fmt: skip
    targets = await way(tmp_path, config)
    user = getpass.getuser()

    assert [(target.user, target.host, target.port) for target in targets] == [
        (user, "outer", 22), ("me", "edge.example", 2200), (user, "::1", 2201), ("in", "gpu-1-inner", 22),
        (user, "gpu-1", 22),
    ]  # fmt: skip
    assert [target.proxy_command for target in targets] == ["nc outer 22", None, None, None, None]
    assert [target.port for target in await way(tmp_path, config, "gpu-2")] == [1, 22]
    assert [target.host for target in await way(tmp_path, config, "gpu-3")] == ["gpu-3"]


async def test_the_fleet_s_jump_takes_the_place_of_ssh_s_proxy(tmp_path: Path) -> None:
    """As ``ssh -J`` does."""
    targets = await way(tmp_path, "Host gpu-1\n ProxyCommand nc %h %p\n", jump=("edge",))

    assert [(target.host, target.proxy_command) for target in targets] == [("edge", None), ("gpu-1", None)]


async def test_a_proxy_command_is_filled_in_and_keeps_what_the_shell_reads(tmp_path: Path) -> None:
    """Tokens are the names, ``%%`` is ``%``; quotes, variables and comments are the shell's."""
    config = 'Host gpu-1\n HostName real\n User ops\n Port 9\n ProxyCommand nc %h %p %r %n 100%% "$HOME" ${X} #c\n'

    assert (await one(tmp_path, config)).proxy_command == 'nc real 9 ops gpu-1 100% "$HOME" ${X} #c'


@pytest.mark.parametrize("user", ["a;id", "$(id)", "`id`", "a|b", "a'b", "a>b", "a\\b", "a b"])
async def test_a_name_that_a_shell_would_act_on_goes_into_no_proxy_command(tmp_path: Path, user: str) -> None:
    """Refused also where ssh's own configuration names it, which ssh itself trusts."""
    with pytest.raises(NodeMisconfigured, match=r"ProxyCommand: a shell would act on .* \(%r\)"):
        await one(tmp_path, f'Host gpu-1\n User "{user}"\n ProxyCommand nc %r@%h\n')

    assert (await one(tmp_path, f'Host gpu-1\n User "{user}"\n ProxyCommand nc %h\n')).proxy_command == "nc gpu-1"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("KnownHostsCommand /bin/echo %H", "KnownHostsCommand is not run"),
        ("BindInterface lo", "BindInterface can't be followed"),
        ("ProxyCommand nc %h %p\nProxyUseFdpass yes", "ProxyUseFdpass can't be followed"),
        ("PreferredAuthentications gssapi-with-mic", "allows no login by key, by password, or by the server's quest"),
        ("UserKnownHostsFile here", "relative path, 'here'"),
        ("Bogus yes", "`ssh -G` says: .*: Bad configuration option: bogus"),
    ],
)
async def test_what_guards_a_login_and_can_not_be_followed_is_refused(tmp_path: Path, config: str, words: str) -> None:
    """In one line with the node's name and the setting's."""
    with pytest.raises(NodeMisconfigured, match=rf"^gpu-1: .*{words}"):
        await one(tmp_path, f"{config}\n")


async def test_the_fleet_s_known_hosts_take_the_place_of_a_known_hosts_command(tmp_path: Path) -> None:
    """The way out that the refusal names."""
    target = await one(tmp_path, "KnownHostsCommand /bin/echo %H\n", known_hosts=("/k",))

    assert target.known_hosts == (Path("/k"),)


@pytest.mark.parametrize(
    ("config", "note"),
    [
        ("StrictHostKeyChecking no", "StrictHostKeyChecking no is followed as accept-new"),
        ("StrictHostKeyChecking off", "StrictHostKeyChecking no is followed as accept-new"),
        ("VerifyHostKeyDNS yes", "VerifyHostKeyDNS is not followed"),
        ("NoHostAuthenticationForLocalhost yes", "NoHostAuthenticationForLocalhost is not followed"),
        ("PermitLocalCommand yes\nLocalCommand touch /x", "LocalCommand is not run"),
        ("PKCS11Provider /lib/x.so", "PKCS11Provider is not used"),
    ],
)
async def test_what_is_not_followed_is_said(tmp_path: Path, config: str, note: str) -> None:
    """One line a setting, and the way stands."""
    (line,) = (await one(tmp_path, f"{config}\n")).notes

    assert line.startswith(note)


@pytest.mark.parametrize(
    "config", ["", "ForwardAgent yes\nControlMaster auto\nControlPath ~/x\nSendEnv A\nForwardX11 yes\n"]
)
async def test_an_ordinary_configuration_says_nothing(tmp_path: Path, config: str) -> None:
    """Neither what ssh does by itself nor what no login's safety hangs on; no algorithm is set by anyone."""
    target = await one(tmp_path, config)

    assert (target.notes, target.settings.algorithms) == ((), ())


async def test_algorithms_are_those_that_somebody_has_set(tmp_path: Path) -> None:
    """ssh's own lists are changed by signs and patterns, which ssh works out."""
    target = await one(tmp_path, "Ciphers -aes128*,aes192*,chacha*\nMACs hmac-sha2-256\n")

    assert dict(target.settings.algorithms) == {
        "ciphers": ("aes256-ctr", "aes256-gcm@openssh.com"),
        "macs": ("hmac-sha2-256",),
    }


def test_nothing_asked_is_the_defaults() -> None:
    """No setting, no note."""
    assert read_settings({}, {}) == SshSettings()


def test_tokens_are_filled_in_in_one_pass() -> None:
    """What a token stands for is not looked into; what has no value is refused."""
    assert expand("%h/${A}/%%h", {"h": "${A}", "%": "%"}, {"A": "%h"}) == "${A}/%h/%h"
    assert expand("${A}", {}, None) == "${A}"
    for text in ("%x", "%", "${B}"):
        with pytest.raises(Refused):
            expand(text, {}, {})


def test_files_that_lost_their_quotes_are_told_apart() -> None:
    """A word that looks absolute begins a file."""
    assert split_files("/a b/c /d ~/e f") == ("/a b/c", "/d", "~/e f")
    with pytest.raises(Refused):
        split_files("a /b")


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("", {"new_host_keys": NewHostKeys.ASK, "login_methods": METHODS, "password_prompts": 3, "batch_mode": False}),
        ("StrictHostKeyChecking yes", {"new_host_keys": NewHostKeys.NEVER}),
        ("StrictHostKeyChecking ask", {"new_host_keys": NewHostKeys.ASK}),
        ("StrictHostKeyChecking accept-new\nHashKnownHosts yes",
         {"new_host_keys": NewHostKeys.ACCEPT, "hash_known_hosts": True, "notes": ()}),
        ("StrictHostKeyChecking off\nHashKnownHosts no",
         {"new_host_keys": NewHostKeys.ACCEPT, "hash_known_hosts": False}),
        ("PubkeyAuthentication no", {"login_methods": ("keyboard-interactive", "password")}),
        ("PreferredAuthentications password,gssapi-with-mic,publickey", {"login_methods": ("password", "publickey")}),
        ("PasswordAuthentication no\nKbdInteractiveAuthentication no", {"login_methods": ("publickey",)}),
        ("BatchMode yes\nNumberOfPasswordPrompts 1", {"batch_mode": True, "password_prompts": 1}),
    ],
)  # fmt: skip
async def test_what_may_be_asked_is_what_ssh_would_ask(tmp_path: Path, lines: str, expected: dict[str, object]) -> None:
    """New host keys, ways to log in and their order, how often, and BatchMode."""
    settings = (await one(tmp_path, lines)).settings

    assert {key: getattr(settings, key) for key in expected} == expected
