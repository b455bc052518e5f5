"""ssh's configuration without ssh: the same as the real one where it is read at all, else refused by file and line."""

from __future__ import annotations

import dataclasses
import re
import subprocess
from pathlib import Path

import pytest

from console.config_nodes import Node
from console.errors import NodeMisconfigured
from console.transports import Gate
from console.transports.ssh_config_file import Misread, read_files
from console.transports.ssh_oracle import Settings, parse
from console.transports.ssh_target import Target, resolve
from tests.console.links import gate
from tests.needs import need

READ_ALIKE = [
    "Host gpu-*\n  HostName gpu.example\n  User ops\n  Port 2222\nHost *\n  User other\n  ServerAliveInterval 7\n",
    "Host * !gpu-1\n  Port 1\nHost !gpu-1 *\n  Port 2\nHost g?u-1 other\n  Port 3\n",
    "port=4\nUser = ops\nHostKeyAlias\tpool\n",
    '# a comment\n\nHost "gpu-1" # the first\n  User "ops" # me\n  IdentityFile "~/a b"\n  IdentityFile ~/%r\n',
    "IdentityFile ~/1\nHost gpu-1\n IdentityFile ~/2\n IdentityFile ~/1\n CertificateFile ~/c-cert.pub\n",
    "IdentitiesOnly yes\nIdentityAgent none\nStrictHostKeyChecking accept-new\n",
    "ProxyJump edge,me@inner:22\nProxyCommand nc %h %p\n",
    'ProxyCommand nc %h %p  "a b" #c\nProxyJump edge\n',
    "ProxyCommand none\nProxyJump edge\n",
    "ProxyJump none\nProxyCommand nc %h\n",
    "UserKnownHostsFile /a /b\nGlobalKnownHostsFile none\n",
    "Include more-*.conf\nPort 9\n",
    "Host other\n  Include more-*.conf\nHost gpu-1\n  Port 9\n",
    "Host gpu-1\n  Include more-*.conf\n  User after\n",
    "Ciphers aes256-ctr,aes128-ctr\nRequiredRSASize 2048\nConnectTimeout 7\n",
    "AddressFamily inet\nBindAddress 127.0.0.1\n",
    "SendEnv LANG LC_*\nForwardAgent yes\nControlMaster auto\nHost *\n GSSAPIAuthentication yes\n",
]
COMPARED = (
    "hostname", "user", "port", "identityfile", "certificatefile", "identitiesonly", "identityagent", "hostkeyalias",
    "stricthostkeychecking", "proxyjump", "proxycommand", "userknownhostsfile", "globalknownhostsfile", "ciphers",
    "requiredrsasize", "connecttimeout", "addressfamily", "bindaddress", "serveraliveinterval",
)  # fmt: skip


@pytest.mark.parametrize("text", READ_ALIKE)
def test_what_is_read_is_what_ssh_reads(tmp_path: Path, text: str) -> None:
    """Every setting that is found is ssh's own value of it, and none that the file sets is missed."""
    (tmp_path / ".ssh").mkdir()
    (tmp_path / "more-1.conf").write_text("Host gpu-1\n  Port 5\nHost other\n  Port 6\n")
    (tmp_path / "more-2.conf").write_text("User later\nHost *\n  User last\n")
    (tmp_path / ".ssh" / "config").write_text(text.replace("more-", f"{tmp_path}/more-"))
    asked, usual = ask(str(tmp_path / ".ssh" / "config")), ask("none")
    settings = read_files("gpu-1", tmp_path, system_file=tmp_path / "none")

    for key in COMPARED:
        mine = settings.get(key, usual.get(key, ()))
        assert _alike(mine) == _alike(asked.get(key, ())), key


def ask(file: str) -> Settings:
    argv = [need("ssh", "openssh-client"), "-G", "-F", file, "gpu-1"]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=30, stdin=subprocess.DEVNULL)
    return parse(done.stdout)


def _alike(values: tuple[str, ...]) -> list[str]:
    """``none`` for a proxy is the same as nothing."""
    return [value for value in values if value != "none"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("Match all", "Match is left to ssh"),
        ("HostName %h.example", "hostname %h.example is left to ssh"),
        ("UserKnownHostsFile ~/k-%h", "userknownhostsfile ~/k-%h is left to ssh"),
        ("IdentityAgent ${HOME}/a", "is left to ssh"),
        ("ConnectTimeout 30s", "connecttimeout 30s is left to ssh"),
        ("Ciphers +aes128-cbc", "is left to ssh"),
        ("CanonicalizeHostname yes", "is left to ssh"),
        ("NewAndUnheardOf yes", "newandunheardof yes is left to ssh"),
        ("Include ~other/x", "Include ~other/x is left to ssh"),
        ("User a\\b", "a backslash or a quoted # is left to ssh"),
        ('User "ops', "a quote is not closed"),
        ("Port", "port has no value"),
        ("Include .ssh/config", "includes more files than ssh follows"),
    ],
)
def test_what_ssh_alone_can_work_out_is_refused_by_file_and_line(tmp_path: Path, line: str, words: str) -> None:
    """Also where it stands in a file that is included; never passed over."""
    folder = tmp_path / ".ssh"
    folder.mkdir()
    (folder / "config").write_text("# mine\nInclude sites\n")
    (folder / "sites").write_text(f"\n\n{line.replace('.ssh/config', str(folder / 'sites'))}\n")

    with pytest.raises(Misread, match=rf"^{folder}/sites:3: .*{re.escape(words)}"):
        read_files("gpu-1", tmp_path, system_file=tmp_path / "none")


def test_a_line_of_another_host_is_no_matter(tmp_path: Path) -> None:
    """What does not apply can't be misread, but for Match, which might."""
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "config").write_text("Host other\n  HostName %h.example\nHost gpu-1\n  Port 7\n")

    assert read_files("gpu-1", tmp_path, system_file=tmp_path / "none") == {"port": ("7",)}


def test_a_file_that_others_may_write_is_refused(tmp_path: Path) -> None:
    """As ssh refuses it."""
    (tmp_path / ".ssh").mkdir()
    config = tmp_path / ".ssh" / "config"
    config.write_text("Port 7\n")
    config.chmod(0o666)

    with pytest.raises(Misread, match="others may write it"):
        read_files("gpu-1", tmp_path, system_file=tmp_path / "none")


async def without_ssh(directory: Path, shared: Gate | None = None) -> Target:
    node = dataclasses.replace(Node("gpu-1"), ssh_config=str(directory / "config"))
    (target,) = await resolve(node, shared or no_ssh(directory))
    return target


def no_ssh(directory: Path) -> Gate:
    return dataclasses.replace(gate(directory), ssh=str(directory / "no-ssh"))


async def test_a_node_is_reached_without_ssh_and_that_is_said(tmp_path: Path) -> None:
    """The settings hold, and the first node's note says who read them."""
    shared = no_ssh(tmp_path)
    (tmp_path / "config").write_text("Host gpu-1\n HostName 192.0.2.1\n Port 7\n UserKnownHostsFile ~/k\n")
    target, later = await without_ssh(tmp_path, shared), await without_ssh(tmp_path, shared)

    assert (target.host, target.port, target.known_hosts[0]) == ("192.0.2.1", 7, tmp_path / "k")
    assert target.notes[0].startswith("no ssh client is installed")
    assert later.notes == ()
    assert later == target


async def test_a_node_that_needs_ssh_says_which_line_does(tmp_path: Path) -> None:
    """The node is not reached by guesses."""
    (tmp_path / "config").write_text("Match all\n  Port 7\n")

    with pytest.raises(NodeMisconfigured, match=rf"^gpu-1: {tmp_path}/config:1: Match is left to ssh"):
        await without_ssh(tmp_path)
