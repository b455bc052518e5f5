"""``python -m console.transports.embedded``: the SSH server of ``glowplug demo``, on a loopback port.

It runs as a process of its own, so that the demo's nodes end with the console in
whatever way that ends. Standard input carries one line of JSON (`ServerOrder`) and is
then the console's lifeline: at its end the server closes, ends every node and removes
the directory where that was asked for. Standard output carries one line, `ServerReady`.

What a client may do: authenticate with the one key made for this demo, and have a
command run by ``sh -c`` as a real process in its node's environment. Nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import logging
import os
import shutil
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import asyncssh

from console.demo_teardown import end_nodes
from remote_agent.protocol.codec import decode, encode

_PR_SET_CHILD_SUBREAPER = 36
_HANG_UP_S = 2.0
_LAST_WORDS_S = 1.0
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServerNode:
    """One node: the SSH user that reaches it, and what a login finds there."""

    user: str
    home: str
    state_directory: str
    environment: Mapping[str, str]


@dataclass(frozen=True)
class ServerOrder:
    """What to serve. ``key_directory`` receives the client's key and the known_hosts file."""

    directory: str
    key_directory: str
    mark: str
    nodes: tuple[ServerNode, ...]
    remove_directory: bool


@dataclass(frozen=True)
class ServerReady:
    port: int
    identity: str
    known_hosts: str


class _Door(asyncssh.SSHServer):
    """Lets in the demo's own key, for the users that are its nodes."""

    def __init__(self, key: asyncssh.SSHKey, users: frozenset[str]) -> None:
        self._key = key
        self._users = users

    def begin_auth(self, username: str) -> bool:
        return True

    def password_auth_supported(self) -> bool:
        return False

    def kbdint_auth_supported(self) -> bool:
        return False

    def public_key_auth_supported(self) -> bool:
        return True

    def validate_public_key(self, username: str, key: asyncssh.SSHKey) -> bool:
        return username in self._users and key.public_data == self._key.public_data


class EmbeddedServer:
    """The running server; `start` returns how to reach it, `close` ends every session."""

    def __init__(self, order: ServerOrder) -> None:
        self._order = order
        self._nodes = {node.user: node for node in order.nodes}
        self._acceptor: asyncssh.SSHAcceptor | None = None

    async def start(self) -> ServerReady:
        """Listen with fresh ed25519 keys. Raises: OSError."""
        host_key = asyncssh.generate_private_key("ssh-ed25519", comment="glowplug demo host")
        user_key = asyncssh.generate_private_key("ssh-ed25519", comment="glowplug demo user")
        users = frozenset(self._nodes)
        self._acceptor = await asyncssh.listen(
            "127.0.0.1",
            0,
            server_factory=lambda: _Door(user_key, users),
            server_host_keys=[host_key],
            process_factory=self._serve,
            encoding=None,
            line_editor=False,
            allow_pty=False,
            allow_scp=False,
            agent_forwarding=False,
            x11_forwarding=False,
            compression_algs=None,
            login_timeout=20,
        )
        port = self._acceptor.get_port()
        directory = Path(self._order.key_directory)
        identity, known_hosts = directory / "id_ed25519", directory / "known_hosts"
        _write_private(identity, user_key.export_private_key())
        _write_private(known_hosts, f"[127.0.0.1]:{port} ".encode() + host_key.export_public_key())
        return ServerReady(port, str(identity), str(known_hosts))

    async def close(self) -> None:
        if self._acceptor is not None:
            self._acceptor.close()
            await self._acceptor.wait_closed()

    async def _serve(self, process: asyncssh.SSHServerProcess[bytes]) -> None:
        node = self._nodes[process.get_extra_info("username")]
        if process.command is None or process.subsystem is not None:
            process.stderr.write(b"glowplug demo: only commands are served here\n")
            process.exit(1)
            return
        child = await asyncio.create_subprocess_exec(
            "/bin/sh",
            "-c",
            process.command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=node.home,
            env=dict(node.environment),
            start_new_session=True,
        )
        try:
            await _converse(child, process)
        finally:
            await _hang_up(child)
        with contextlib.suppress(OSError):
            process.exit(child.returncode if child.returncode is not None and child.returncode >= 0 else 255)


async def _converse(child: asyncio.subprocess.Process, process: asyncssh.SSHServerProcess[bytes]) -> None:
    """Pass bytes both ways until the command has ended and said all, or its channel has closed."""
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stderr is not None
    outputs = {
        asyncio.ensure_future(_pump(child.stdout, process.stdout)),
        asyncio.ensure_future(_pump(child.stderr, process.stderr)),
    }
    feeding = asyncio.ensure_future(_feed(process.stdin, child.stdin))
    closing = asyncio.ensure_future(process.channel.wait_closed())
    ending = asyncio.ensure_future(child.wait())
    try:
        await asyncio.wait({ending, closing}, return_when=asyncio.FIRST_COMPLETED)
        if ending.done():  # a daemon it left behind may still hold the pipes
            await asyncio.wait(outputs, timeout=_LAST_WORDS_S)
    finally:
        for task in (*outputs, feeding, closing, ending):
            task.cancel()


async def _pump(source: asyncio.StreamReader, target: asyncssh.SSHWriter[bytes]) -> None:
    with contextlib.suppress(OSError, asyncssh.Error):
        while data := await source.read(65536):
            target.write(data)
            await target.drain()


async def _feed(source: asyncssh.SSHReader[bytes], target: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError, asyncssh.Error):
        while data := await source.read(65536):
            target.write(data)
            await target.drain()
    target.close()


async def _hang_up(child: asyncio.subprocess.Process) -> None:
    """End a command whose channel is gone, as sshd does; a daemon it left behind lives on."""
    for number in (signal.SIGHUP, signal.SIGKILL):
        if child.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_HANG_UP_S):
                await child.wait()


def _write_private(path: Path, content: bytes) -> None:
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)


async def _serve_until_released(order: ServerOrder) -> None:
    loop = asyncio.get_running_loop()
    released = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, released.set)
    loop.add_reader(0, _watch_lifeline, released)
    server = EmbeddedServer(order)
    try:
        ready = await server.start()
        os.write(1, json.dumps(encode(ready)).encode() + b"\n")
        await released.wait()
    finally:
        loop.remove_reader(0)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(5.0):
                await server.close()


def _watch_lifeline(released: asyncio.Event) -> None:
    if not os.read(0, 4096):
        released.set()


def _read_order() -> ServerOrder:
    line = b""
    while not line.endswith(b"\n"):
        part = os.read(0, 65536)
        if not part:
            raise ValueError("no order came before the end of standard input")
        line += part
    return decode(ServerOrder, json.loads(line))


def main() -> int:
    """Serve until the lifeline ends, then leave nothing; 1 if something had to be killed."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.INFO)
    order = _read_order()
    _adopt_orphans()
    try:
        asyncio.run(_serve_until_released(order))
    finally:
        problems = end_nodes([Path(node.state_directory) for node in order.nodes], order.mark)
        for problem in problems:
            log.warning("%s", problem)
        if order.remove_directory:
            shutil.rmtree(order.directory, ignore_errors=True)
    return 1 if problems else 0


def _adopt_orphans() -> None:
    """Become the parent of the daemons that sessions leave behind, so that none stays as a zombie."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main())
