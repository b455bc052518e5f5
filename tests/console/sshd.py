"""A real OpenSSH server on a loopback port, with its own keys and whatever login shell a test wants."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from console.config_nodes import Node
from tests.console import stub_agent
from tests.needs import need

STUB = Path(stub_agent.__file__)
DEADLINE_S = 20.0


def sshd_binary() -> str:
    return need("sshd", "openssh-server")


def ssh_keygen() -> str:
    return need("ssh-keygen", "openssh-client")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def until(condition: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Wait for ``condition``, fail after the deadline. For code without an event loop."""
    end = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > end:
            pytest.fail(f"not within {deadline_s} s: {what}")
        time.sleep(0.02)


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text()
    except OSError:
        return ""  # it has just ended


def make_key(path: Path, passphrase: str = "") -> Path:
    subprocess.run(
        [ssh_keygen(), "-q", "-t", "ed25519", "-a", "1", "-N", passphrase, "-C", "test", "-f", str(path)],
        check=True,
        timeout=30,
    )
    return path


def sign(authority: Path, key: Path, *options: str) -> Path:
    """Have ``authority`` sign the public half of ``key``."""
    argv = [ssh_keygen(), "-q", "-s", str(authority), "-I", "test", *options, f"{key}.pub"]
    subprocess.run(argv, check=True, timeout=30)
    return key.with_name(f"{key.name}-cert.pub")


class Sshd:
    """One server. ``shell``: argv prefix that gets ``-c COMMAND`` in place of the account's login shell.

    ``inside``: what stands before an argv that runs on the host of that ``address``; this machine by default.
    ``environment``: what logins get, unless ``options`` set one. HOME is an empty folder by default: a login shell
    reads the account's start-up files, which may take longer than the test and wait for each other.
    """

    def __init__(
        self,
        directory: Path,
        *,
        shell: str | None = None,
        options: tuple[str, ...] = (),
        address: str = "127.0.0.1",
        inside: tuple[str, ...] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory, self.port = directory, free_port()
        self.address, self._inside = address, inside
        self.host_key, self.user_key = make_key(directory / "host_key"), make_key(directory / "user_key")
        self.log = directory / "sshd.log"
        self.known_hosts = directory / "known_hosts"
        self.known_hosts.write_text(self.known_hosts_line() + "\n")
        home = directory / "home"  # the first SetEnv counts
        home.mkdir(exist_ok=True)
        public = self.user_key.with_suffix(".pub").read_text()
        wrap = directory / "wrap"
        wrap.write_text(f'#!/bin/sh\nexec {shell or "/bin/sh"} -c "$SSH_ORIGINAL_COMMAND"\n')
        wrap.chmod(0o755)
        prefix = f'command="{wrap}" ' if shell else ""
        (directory / "authorized_keys").write_text(prefix + public)
        (directory / "authorized_keys").chmod(0o600)
        # With SHLVL bash takes itself for one that another shell started, and reads no start-up files of the host's.
        given = {"HOME": str(home), "SHLVL": "1", **(environment or {})}
        settings = " ".join(f'"{name}={value}"' for name, value in given.items())
        lines = [
            f"Port {self.port}", f"ListenAddress {address}", f"HostKey {self.host_key}",
            f"AuthorizedKeysFile {directory / 'authorized_keys'}", f"PidFile {self._pid_file}",
            "StrictModes no", "UsePAM no", "PasswordAuthentication no", "KbdInteractiveAuthentication no",
            "PermitRootLogin yes", "AllowTcpForwarding yes", *options, f"SetEnv {settings}",
        ]  # fmt: skip
        (directory / "sshd_config").write_text("\n".join(lines) + "\n")
        self.process: subprocess.Popen[bytes] | None = None

    def known_hosts_line(self) -> str:
        algorithm, data = self.host_key.with_suffix(".pub").read_text().split()[:2]
        return f"[{self.address}]:{self.port} {algorithm} {data}"

    def fingerprint(self) -> str:
        """The host key's fingerprint as OpenSSH itself prints it."""
        result = subprocess.run(
            [ssh_keygen(), "-lf", str(self.host_key)],
            check=True,
            capture_output=True,
            text=True,
        )
        return result.stdout.split()[1]

    def start(self) -> Sshd:
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(parents=True, exist_ok=True)
        self._pid_file.unlink(missing_ok=True)
        argv = [*self._inside, sshd_binary(), "-D", "-f", str(self.directory / "sshd_config"), "-E", str(self.log)]
        self.process = subprocess.Popen(argv, stdin=subprocess.DEVNULL)
        until(self._pid_file.exists, f"sshd on port {self.port}: {self.log.read_text() if self.log.exists() else ''}")
        return self

    @property
    def _pid_file(self) -> Path:
        """Is written once the server listens."""
        return self.directory / "sshd.pid"

    def descendants(self) -> list[int]:
        """Every process below the server's own: one or two a connection, and what they run."""
        assert self.process is not None
        found, look = [], [self.process.pid]
        while look:
            try:
                text = Path(f"/proc/{look[0]}/task/{look.pop(0)}/children").read_text()
            except OSError:
                continue
            children = [int(pid) for pid in text.split()]
            found += children
            look += children
        return found

    def connection_processes(self) -> list[int]:
        """The server's processes that serve a connection, without the commands they run."""
        return [pid for pid in self.descendants() if "sshd" in _name(pid)]

    def logins(self) -> int:
        return self.log.read_text().count("Accepted publickey")

    def stop(self) -> None:
        """End the server and all of its connections."""
        if self.process is None:
            return
        for pid in reversed(self.descendants()):  # children first, so that each is reaped by its own parent
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        until(lambda: not self.descendants(), "the connections' processes to end")
        self.process.kill()
        self.process.wait()
        self.process = None

    def node(self, name: str = "gpu-1", *, script: str = "", heartbeat_s: float = 1.0, **settings: Any) -> Node:
        """A node behind this server whose agent is the stub, playing ``script``."""
        values: dict[str, Any] = {
            "host": self.address,
            "port": self.port,
            "identity": (str(self.user_key),),
            "known_hosts": (str(self.known_hosts),),
            **stub_settings(script, heartbeat_s),
            **settings,
        }
        return Node(name, **values)


def stub_settings(script: str = "", heartbeat_s: float = 1.0, log: Path | None = None) -> dict[str, Any]:
    """The settings of a `Node` that make the stub its agent."""
    options = ["--heartbeat", str(heartbeat_s)] + (["--script", script] if script else [])
    options += ["--log", str(log)] if log else []
    return {"python": (sys.executable, "-S", "-E"), "agent": (str(STUB), *options)}


def script(directory: Path, text: str, name: str = "shell") -> str:
    path = directory / name
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


@contextmanager
def servers(directory: Path) -> Iterator[Callable[..., Sshd]]:
    """Yield what starts servers, each in a directory of its own; all end with the block."""
    started: list[Sshd] = []

    def start(**options: Any) -> Sshd:
        server = Sshd(directory / f"sshd-{len(started)}", **options)
        started.append(server)
        return server.start()

    try:
        yield start
    finally:
        for server in started:
            server.stop()


def stub_node(script: str = "", heartbeat_s: float = 1.0, log: Path | None = None, **settings: Any) -> Node:
    return Node("gpu-1", transport=("env",), **{**stub_settings(script, heartbeat_s, log), **settings})
