"""A GPU host as its user finds it, behind a real sshd, and a workstation with ssh's own configuration."""

from __future__ import annotations

import getpass
import json
import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from remote_agent.agentd.paths import StateDir
from remote_agent.client import connect_running, open_client
from remote_agent.protocol.messages import ReleaseParams, ReleaseResult
from tests.console.sshd import Sshd, until
from tests.leftovers import MARK as SESSION_MARK
from tests.needs import need

REPOSITORY = Path(__file__).parents[2]
PATIENCE_S = 90.0
ENDING_S = 15.0
HOST_MARK = "GLOWPLUG_TEST_HOST"
AGENT = ".local/share/glowplug/glowplug-agent.pyz"

# sshd enters the directory that the account has in passwd, whatever HOME it was told to set.
_LOGIN = '#!/bin/sh\ncd "$HOME" || exit 1\nunset SHLVL\nexec {shell} -c "$SSH_ORIGINAL_COMMAND"\n'
_SFTP_SERVERS = ("/usr/lib/openssh", "/usr/libexec/openssh", "/usr/lib/ssh", "/usr/libexec")


class OwnHost:
    """One account on one host: a real login shell in a home of its own; PATH is sshd's.

    What was ever started there carries a mark, so nothing of it can hide from `processes`.
    """

    def __init__(
        self, directory: Path, *, shell: str = "/bin/sh", environment: Mapping[str, str] | None = None
    ) -> None:
        self.home = directory / "home"
        self.home.mkdir(parents=True)
        self.state = StateDir(self.home / ".local" / "state" / "glowplug-agent")
        self._mark = uuid.uuid4().hex
        login = directory / "login"
        login.write_text(_LOGIN.format(shell=shell))
        login.chmod(0o755)
        marks = {"HOME": str(self.home), HOST_MARK: self._mark, SESSION_MARK: os.environ[SESSION_MARK]}
        options = (f"ForceCommand {login}", f"Subsystem sftp {_sftp_server()}", "PermitUserRC no")
        self.sshd = Sshd(directory / "sshd", options=options, environment={**marks, **(environment or {})})

    def start(self) -> OwnHost:
        self.sshd.start()
        return self

    def processes(self) -> dict[int, tuple[str, ...]]:
        """Return the arguments of each living process that a login started, or that such a one started."""
        entry = f"{HOST_MARK}={self._mark}".encode()
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if entry in (folder / "environ").read_bytes().split(b"\0"):
                    words = (folder / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")
                    found[int(folder.name)] = tuple(words)
            except OSError:
                continue
        return found

    def bridges(self) -> list[int]:
        return [pid for pid, words in self.processes().items() if "bridge" in words]

    def put(self, agent: Path) -> None:
        """Lay the agent where an upload puts it."""
        target = self.home / AGENT
        target.parent.mkdir(parents=True)
        shutil.copyfile(agent, target)

    def release_all(self) -> None:
        """Let go of whatever is warm, if an agent runs."""
        if self.state.run.exists():
            with open_client(self.state, "release", connect_running) as client:
                client.call("resident.release", ReleaseParams(everything=True), ReleaseResult)

    def close(self) -> None:
        """End the agent as its user would, then the server. Fails if anything does not end by that."""
        try:
            if self.state.run.exists():
                stop = [sys.executable, "-m", "remote_agent", "stop", "--force", "--keeper"]
                subprocess.run([*stop, "--state-dir", str(self.state.root)], cwd=REPOSITORY, check=True, timeout=60)
            until(lambda: not self.processes(), "the host's processes end", ENDING_S)
        finally:
            for pid in self.processes():
                os.kill(pid, signal.SIGKILL)
            self.sshd.stop()


@dataclass(frozen=True)
class Said:
    """How a command ended and what it said."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        return json.loads(self.out)


class Workstation:
    """An operator's machine: a home, ssh with a configuration of its own, and ``glowplug``."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.ssh_config, self.known_hosts = directory / "ssh_config", directory / "known_hosts"
        commands = directory / "bin"
        commands.mkdir(parents=True)
        self.ssh_config.touch()
        for name in ("ssh", "scp"):  # ssh takes its user's home from passwd, so HOME can't point it elsewhere
            _write_command(commands / name, f'exec {need(name, "openssh-client")} -F {self.ssh_config} "$@"')
        _write_command(commands / "glowplug", f'PYTHONPATH={REPOSITORY} exec {sys.executable} -P -m console "$@"')
        places = {f"XDG_{kind}_HOME": str(directory / kind.lower()) for kind in ("CONFIG", "DATA", "STATE", "CACHE")}
        path = f"{commands}:{os.environ['PATH']}"
        self.environ = {**os.environ, **places, "HOME": str(directory), "PATH": path, "SSH_AUTH_SOCK": ""}

    @property
    def config(self) -> Path:
        return self.directory / "config" / "glowplug" / "fleet.toml"

    def know(self, host: OwnHost, alias: str) -> None:
        """Add ``host`` to ssh's configuration; its key is taken at the first login, as if confirmed there."""
        server = host.sshd
        with self.ssh_config.open("a") as file:
            file.write(
                f"Host {alias}\n  HostName 127.0.0.1\n  Port {server.port}\n  User {getpass.getuser()}\n"
                f"  IdentityFile {server.user_key}\n  IdentitiesOnly yes\n"
                f"  UserKnownHostsFile {self.known_hosts}\n  StrictHostKeyChecking accept-new\n"
            )

    def shell(self, script: str) -> Said:
        """Run a script as a person would type it here, until its first command that fails."""
        return self._run(["sh", "-e", "-c", script])

    def glowplug(self, *argv: str) -> Said:
        return self._run(["glowplug", *argv])

    def configure(self, text: str) -> None:
        self.config.parent.mkdir(parents=True, exist_ok=True)
        self.config.write_text(text)

    def _run(self, argv: list[str]) -> Said:
        ended = subprocess.run(
            argv,
            cwd=self.directory,
            env=self.environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        return Said(ended.returncode, ended.stdout, ended.stderr)


def node_table(name: str, server: Sshd, python: str = sys.executable, **changes: object) -> str:
    """Return a node of fleet.toml that says everything itself and leaves nothing to ssh's configuration."""
    settings: dict[str, object] = {
        "host": "127.0.0.1",
        "port": server.port,
        "user": getpass.getuser(),
        "identity": str(server.user_key),
        "known_hosts": str(server.known_hosts),
        "python": python,
        **changes,
    }
    return f"[nodes.{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by a signal, all its threads at rest."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def _write_command(path: Path, line: str) -> None:
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)


def _sftp_server() -> str:
    return need("sftp-server", "openssh-sftp-server", ":".join(_SFTP_SERVERS))
