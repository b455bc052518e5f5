"""Passwords and second factors against OpenSSH itself, with PAM and a user made for the test."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from console.errors import AuthenticationFailed
from console.transports import open_stream
from tests.console.answering import operator, typed
from tests.console.links import gate
from tests.console.sshd import Sshd, make_key, sign
from tests.needs import need

pytestmark = pytest.mark.ssh

PASSWORD = "correct horse"


@pytest.fixture
def user() -> Iterator[str]:
    """A user of this machine with `PASSWORD`, gone after the test."""
    if os.geteuid() != 0:
        pytest.skip("needs root: a user with a password is made for it")
    name = f"glowplug-{os.getpid()}"
    subprocess.run([need("useradd", "passwd"), "-M", "-d", "/", "-s", "/bin/sh", name], check=True, timeout=30)
    try:
        argv = [need("chpasswd", "passwd")]
        subprocess.run(argv, input=f"{name}:{PASSWORD}\n", text=True, check=True, timeout=30)
        yield name
    finally:
        subprocess.run([need("userdel", "passwd"), name], check=True, timeout=30)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Sshd]]:
    """Start servers that ask PAM; all end with the test."""
    servers: list[Sshd] = []

    def start(*options: str) -> Sshd:
        server = Sshd(tmp_path / f"sshd-{len(servers)}")
        config = server.directory / "sshd_config"
        lines = [line for line in config.read_text().splitlines() if line.split()[0] not in OURS]
        config.write_text("\n".join((*lines, *options)) + "\n")
        servers.append(server)
        return server.start()

    yield start
    for server in servers:
        server.stop()


OURS = ("UsePAM", "PasswordAuthentication", "KbdInteractiveAuthentication")


async def test_openssh_s_own_questions_are_answered(user: str, serve: Callable[..., Sshd], tmp_path: Path) -> None:
    """A password; and after a key, PAM's question as a second factor."""
    plain = serve("PasswordAuthentication yes", "KbdInteractiveAuthentication no", "Banner /etc/hostname")
    authority = make_key(tmp_path / "authority")
    both = serve("UsePAM yes", "KbdInteractiveAuthentication yes", "PasswordAuthentication no",
                 "AuthenticationMethods publickey,keyboard-interactive",
                 f"TrustedUserCAKeys {authority}.pub")  # fmt: skip
    sign(authority, both.user_key, "-n", user)
    async with operator(typed("wrong", PASSWORD)) as (prompts, asked):
        await (await open_stream(plain.node(user=user), "token", gate=gate(tmp_path), prompts=prompts)).close()
        assert [prompt.title for prompt in asked] == ["gpu-1: password"] * 2
        assert Path("/etc/hostname").read_text().strip() in asked[0].theirs

        await (await open_stream(both.node(user=user), "token", gate=gate(tmp_path), prompts=prompts)).close()
        assert asked[2].title == "gpu-1: the server asks"
        assert "assword" in asked[2].fields[0].label
        assert asked[2].fields[0].is_secret

    with pytest.raises(AuthenticationFailed, match="it takes answers to questions of its own, which only the console"):
        await open_stream(both.node(user=user), "token", gate=gate(tmp_path))
