"""asyncssh's own server, for what OpenSSH's needs PAM for: passwords, banners, and rounds of questions with echo."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import asyncssh

from console.config_nodes import Node

Round = tuple[str, str, Sequence[tuple[str, bool]]]
"""Name, instructions, and prompts with their echo."""


class AskingServer(asyncssh.SSHServer):
    """Lets nobody in before every one of ``rounds`` was answered by ``answers``, or ``password`` was given."""

    def __init__(
        self, password: str | None, rounds: Sequence[Round], answers: Sequence[Sequence[str]], banner: str
    ) -> None:
        self._password, self._rounds, self._answers, self._banner = password, rounds, answers, banner
        self._connection: asyncssh.SSHServerConnection | None = None
        self.given: list[object] = []
        self.connections: list[asyncssh.SSHServerConnection] = []
        self._at = 0

    def connection_made(self, conn: asyncssh.SSHServerConnection) -> None:
        self.connections.append(conn)

    def begin_auth(self, username: str) -> bool:
        if self._banner:
            self.connections[-1].send_auth_banner(self._banner)
        return True

    def public_key_auth_supported(self) -> bool:
        return False

    def password_auth_supported(self) -> bool:
        return self._password is not None

    def validate_password(self, username: str, password: str) -> bool:
        self.given.append(password)
        return password == self._password

    def kbdint_auth_supported(self) -> bool:
        return bool(self._rounds)

    def get_kbdint_challenge(
        self, username: str, lang: str, submethods: str
    ) -> tuple[str, str, str, Sequence[tuple[str, bool]]]:
        self._at = 0
        return self._challenge()

    def validate_kbdint_response(
        self, username: str, responses: Sequence[str]
    ) -> bool | tuple[str, str, str, Sequence[tuple[str, bool]]]:
        self.given.append(tuple(responses))
        if tuple(responses) != tuple(self._answers[self._at]):
            return False
        self._at += 1
        return self._challenge() if self._at < len(self._rounds) else True

    def _challenge(self) -> tuple[str, str, str, Sequence[tuple[str, bool]]]:
        name, instructions, prompts = self._rounds[self._at]
        return name, instructions, "", prompts


@asynccontextmanager
async def asking_server(
    directory: Path,
    *,
    password: str | None = None,
    rounds: Sequence[Round] = (),
    answers: Sequence[Sequence[str]] = (),
    banner: str = "",
) -> AsyncIterator[tuple[AskingServer, Node]]:
    """A server on a loopback port whose key is known, and a node behind it without an identity of its own."""
    key = asyncssh.generate_private_key("ssh-ed25519")
    server = AskingServer(password, rounds, answers, banner)
    listener = await asyncssh.listen(
        "127.0.0.1", 0, server_factory=lambda: server, server_host_keys=[key], process_factory=lambda process: None
    )
    port = listener.get_port()
    known = directory / "asking_known_hosts"
    algorithm, data = key.export_public_key().decode().split()[:2]
    known.write_text(f"[127.0.0.1]:{port} {algorithm} {data}\n")
    node = Node("gpu-1", host="127.0.0.1", port=port, user="ops", known_hosts=(str(known),), connect_timeout_s=10.0)
    try:
        yield server, node
    finally:
        for connection in server.connections:
            connection.abort()
        listener.close()
        await listener.wait_closed()
