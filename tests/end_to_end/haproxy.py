"""A real HAProxy in front of servers on this machine: health checks, an admin socket, and a client that counts."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self

from console.errors import HookRetry
from console.hooks.haproxy.admin_socket import AdminSocket
from console.hooks.haproxy.places import Place
from console.hooks.haproxy.protocol import Server
from tests.console.sshd import free_port, until
from tests.needs import need

BACKEND = "models"
PACE_S = 0.005

# A frontend may be called like its backend, and `show stat NAME` then knows the frontend alone.
_CONFIG = """\
global
  stats socket {admin} mode 600 level {level}
  stats socket 127.0.0.1:{admin_port} level {level}
  hard-stop-after 10s
  {global_lines}
defaults
  mode http
  option http-server-close
  timeout connect 1s
  timeout client 30s
  timeout server 30s
  {defaults_lines}
frontend {backend}
  bind 127.0.0.1:{port}
  default_backend {backend}
backend {backend}
  balance {algorithm}
  option httpchk GET {check_path}
  default-server inter 50ms fall 2 rise 1
{servers}
"""


class Answers:
    """Counts, beside a test, who answers one request after the other."""

    def __init__(self, ask: Callable[[], str]) -> None:
        self._ask, self._counts = ask, Counter[str]()
        self._over, self._lock = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._go_on)

    def __enter__(self) -> Answers:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def counts(self) -> Counter[str]:
        """Return how often each has answered so far; a request that failed counts for its error."""
        with self._lock:
            return self._counts.copy()

    def _go_on(self) -> None:
        while not self._over.wait(PACE_S):
            answer = self._ask()
            with self._lock:
                self._counts[answer] += 1


class LoadBalancer:
    """HAProxy with a configuration as it is written, which opens ``admin`` and takes requests at ``port`` here.

    ``directory`` is its own, and goes with it.
    """

    def __init__(self, directory: Path, config: str, admin: Path, port: int, backend: str) -> None:
        self.directory, self.admin, self.port, self._backend = directory, admin, port, backend
        self._master = directory / "master.sock"
        self._log, self._config = directory / "haproxy.log", directory / "haproxy.cfg"
        self._config.write_text(config)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.stop()
            raise

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> Self:
        """Return once it takes requests and its servers have had their first checks."""
        argv = [need("haproxy", "haproxy"), "-W", "-db", "-S", str(self._master), "-f", str(self._config)]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        until(lambda: self._answering() is not None, "HAProxy takes requests")
        return self

    def stop(self) -> None:
        """End it with all of its processes, and remove its folder."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)  # the master ends its workers at once, and waits for them
            self._process.wait(20)
        shutil.rmtree(self.directory, ignore_errors=True)

    def reload(self) -> None:
        """Have a new process take over, as ``systemctl reload haproxy`` does; without a state file it knows nothing."""
        assert self._process is not None
        before = self._answering()
        self._process.send_signal(signal.SIGUSR2)
        until(lambda: self._answering() not in (None, before), "HAProxy is reloaded")

    def log(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def ask(self, command: str) -> str:
        """Return HAProxy's whole answer to one command of its runtime API."""
        return AdminSocket(str(self.admin)).ask(command).decode()

    def server(self, name: str) -> Server:
        """Return what HAProxy says of a server of the backend."""
        return Place(AdminSocket(str(self.admin)), f"{self._backend}/{name}").look()

    def _answering(self) -> int | None:
        """Return the process that takes requests and answers on the admin socket; None while there is none."""
        assert self._process is not None
        assert self._process.poll() is None, self.log()
        try:
            # The master has signals ignored until it answers: a reload would be lost.
            if b"worker" not in AdminSocket(str(self._master)).ask("show proc;quit"):
                return None
            socket.create_connection(("127.0.0.1", self.port), 1).close()
            lines = self.ask("show info").splitlines()
        except (OSError, HookRetry):
            return None
        return next((int(line[5:]) for line in lines if line.startswith("Pid: ")), None)


class HAProxy(LoadBalancer):
    """One load balancer whose backend is called `BACKEND`; ``servers`` maps each name to its port on this machine.

    ``options``: more words behind ``server NAME ADDRESS``. The answer of a server to ``check_path`` is its health;
    the body of its answer to anything else is counted as its name.
    """

    def __init__(
        self,
        servers: Mapping[str, int],
        *,
        options: str = "check weight 100",
        check_path: str = "/health",
        level: str = "admin",
        algorithm: str = "roundrobin",
        global_lines: str = "",
        defaults_lines: str = "",
    ) -> None:
        directory = Path(tempfile.mkdtemp(prefix="haproxy-"))  # a socket's path has at most 107 bytes
        admin, port, self.admin_port = directory / "admin.sock", free_port(), free_port()
        lines = (f"  server {name} 127.0.0.1:{at} {options}" for name, at in servers.items())
        config = _CONFIG.format(
            admin=admin,
            admin_port=self.admin_port,
            level=level,
            port=port,
            backend=BACKEND,
            check_path=check_path,
            servers="\n".join(lines),
            global_lines=global_lines,
            defaults_lines=defaults_lines,
            algorithm=algorithm,
        )
        super().__init__(directory, config, admin, port, BACKEND)

    def count(self, requests: int, path: str = "/") -> Counter[str]:
        """Return how many of so many requests, one after the other, each server answered; ``502`` where none did."""
        return Counter(self.get(path) for _ in range(requests))

    def traffic(self, path: str = "/") -> Answers:
        """Return what sends requests until it is left, `PACE_S` apart, and counts who answers."""
        return Answers(lambda: self.get(path))

    def get(self, path: str = "/") -> str:
        """Return the body of one answer, the status of one that is an error, or what kept it from coming."""
        try:
            with urllib.request.urlopen(f"{self.url}{path}", timeout=30) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as error:
            with error:
                return str(error.code)
        except OSError as error:
            return type(error).__name__
