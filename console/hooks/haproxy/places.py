"""A server at a load balancer: what it is, and changes that count only once they were read back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from console.errors import HookFailed, HookRetry
from console.hooks.haproxy.admin_socket import AdminSocket
from console.hooks.haproxy.memory import Memory
from console.hooks.haproxy.protocol import (
    Server,
    State,
    change_command,
    check_changed,
    find_command,
    kill_command,
    look_command,
    parse_find,
    parse_look,
)

POLL_S = 0.25
Tell = Callable[[str], None]


class Place:
    """One server behind one admin socket. Every error names both."""

    def __init__(self, socket: AdminSocket, server: str) -> None:
        self.socket, self.server = socket, server

    @property
    def key(self) -> tuple[str, str]:
        return self.socket.address, self.server

    def __str__(self) -> str:
        return f"{self.server} at {self.socket.address}"

    def look(self) -> Server:
        """Raises: HookRetry where HAProxy can't be asked now; HookFailed where it refuses."""
        try:
            numbers = parse_find(self.socket.ask(find_command(self.server)), self.server)
            return parse_look(self.socket.ask(look_command(self.server, numbers)), self.server)
        except HookFailed as error:
            raise type(error)(f"{self}: {error}") from error

    def change(self, to: State | int) -> None:
        """Set the state, or the weight, and read it back.

        Raises: HookFailed where HAProxy refuses or it is something else afterwards; HookRetry where it can't be asked.
        """
        self._command(change_command(self.server, to))
        found = self.look()
        now: State | int = found.state if isinstance(to, State) else found.weight
        if now != to:
            raise HookFailed(f"{self}: {describe(now)} after it was set to {describe(to)}{whose(found)}")

    def end_sessions(self) -> None:
        """Have HAProxy end every session of the server. Raises: HookFailed, HookRetry."""
        self._command(kill_command(self.server))

    def _command(self, command: str) -> None:
        try:
            check_changed(self.socket.ask(command), command)
        except HookFailed as error:
            raise type(error)(f"{self}: {error}") from error


Seen = Mapping[Place, Server]


def look_at(places: Sequence[Place]) -> Seen:
    """Return what all of them are. Raises: HookRetry, HookFailed at the first that can't be asked."""
    return {place: place.look() for place in places}


def describe(what: State | int) -> str:
    return what.value if isinstance(what, State) else f"weight {what}"


def whose(server: Server) -> str:
    """Say who else may have a hand in a server's state and weight."""
    return ": its agent-check sets that too" if server.has_agent else ""


def watch(places: Sequence[Place], before: Seen, state: State, duration_s: float) -> Iterator[Seen]:
    """Yield what they are, at once and then again and again until so long has passed, once more at the end.

    Raises: HookRetry where HAProxy was reloaded since ``before``; HookFailed where a server left ``state``.
    """
    deadline_s = time.monotonic() + duration_s
    while True:
        is_last = time.monotonic() >= deadline_s
        seen = look_at(places)
        for place, server in seen.items():
            if server.pid != before[place].pid:
                raise HookRetry(f"{place}: {reloaded(before[place].pid, server.pid)} meanwhile; it is {server} there")
            if server.state is not state:
                raise HookFailed(f"{place}: is {server.state.value}, no longer {state.value}{whose(server)}")
        yield seen
        if is_last:
            return
        time.sleep(min(POLL_S, max(0.0, deadline_s - time.monotonic())))


def remember(seen: Seen, memory: Memory, tell: Tell) -> None:
    """Keep what servers are before the first change of a rollout, and say it; say what was lost since.

    Raises: HookFailed where it can't be kept.
    """
    for former in memory.remember({place.key: server for place, server in seen.items()}):
        tell(f"{former.server} at {former.socket}: was {former}")
    before = {former.key: former.pid for former in memory.recall().servers}
    for place, server in seen.items():
        pid = before[place.key]
        if server.pid != pid:
            tell(f"{place}: {reloaded(pid, server.pid)} since this rollout first asked: former sessions are not seen")


def reloaded(before: int, now: int) -> str:
    return f"HAProxy was reloaded (process {before}, now {now})"
