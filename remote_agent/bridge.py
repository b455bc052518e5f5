"""``bridge``: joins stdio to the agent's socket. Sockets only, nothing else imported, so that it starts at once.

Prints the sync mark first. Before the mark stderr belongs to whoever asked;
after it to the agent's log, so that nothing can get between two frames.
"""

from __future__ import annotations

import os
import select
import socket
import sys
from pathlib import Path

from remote_agent.agentd.launch import connect_or_start
from remote_agent.agentd.paths import StateDir, default_root
from remote_agent.errors import AgentError
from remote_agent.protocol.framing import sync_mark

USAGE = "usage: bridge --mark TOKEN [--state-dir DIR]"
CHUNK_BYTES = 65536
PIPE_SAFE_BYTES = 4096
"""A pipe that polls writable takes this much without blocking (PIPE_BUF)."""


def main(argv: list[str]) -> int:
    """Run until stdin closes (0) or the agent goes away (1); 2 for a usage error."""
    if argv in (["-h"], ["--help"]):
        print(f"{USAGE}\n\nJoins stdio to the agent's socket; starts the agent when it is not running.")
        return 0
    options = _parse(argv)
    if options is None:
        print(USAGE, file=sys.stderr)
        return 2
    token, directory = options
    try:
        state = StateDir(Path(directory) if directory else default_root(os.environ))
        link = connect_or_start(state)
        log = os.open(state.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except (AgentError, OSError) as error:
        print(f"glowplug-agent: {error}", flush=True)
        return 1
    try:
        os.write(1, sync_mark(token))
        os.dup2(log, 2)
        return _Pump(link).run()
    except (BrokenPipeError, ConnectionResetError):
        return 0


def _parse(argv: list[str]) -> tuple[str, str] | None:
    values = {"--mark": "", "--state-dir": ""}
    words = list(argv)
    while words:
        name = words.pop(0)
        if name not in values or not words:
            return None
        values[name] = words.pop(0)
    token = values["--mark"]
    if not 8 <= len(token) <= 64 or not token.isascii() or not token.replace("-", "").isalnum():
        return None
    return token, values["--state-dir"]


class _Pump:
    """Carries bytes both ways; neither side is read before its last bytes went on, so neither can block the other."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._inward, self._outward = b"", b""
        self._stdin_open, self._agent_open = True, True

    def run(self) -> int:
        """Return 0 once stdin or stdout is closed, 1 once the agent has gone."""
        self._link.setblocking(False)
        while self._inward or self._stdin_open:
            if not self._outward and not self._agent_open:
                return 1
            ready = self._wait()
            if ready.get(1, 0) & (select.POLLERR | select.POLLHUP | select.POLLNVAL):
                return 0
            if 0 in ready:
                self._inward = os.read(0, CHUNK_BYTES)
                self._stdin_open = bool(self._inward)
            if 1 in ready and self._outward:
                self._outward = self._outward[os.write(1, self._outward[:PIPE_SAFE_BYTES]) :]
            try:
                self._exchange(ready.get(self._link.fileno(), 0))
            except (BrokenPipeError, ConnectionResetError):
                self._agent_open, self._inward = False, b""
        return 0

    def _wait(self) -> dict[int, int]:
        poller = select.poll()
        if self._stdin_open and not self._inward:
            poller.register(0, select.POLLIN)
        poller.register(1, select.POLLOUT if self._outward else 0)
        if self._agent_open:
            wanted = 0 if self._outward else select.POLLIN
            poller.register(self._link, wanted | (select.POLLOUT if self._inward else 0))
        return dict(poller.poll())

    def _exchange(self, mask: int) -> None:
        if self._inward and mask & select.POLLOUT:
            self._inward = self._inward[self._link.send(self._inward) :]
        if mask & (select.POLLIN | select.POLLHUP | select.POLLERR) and not self._outward:
            self._outward = self._link.recv(CHUNK_BYTES)
            self._agent_open = bool(self._outward)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
