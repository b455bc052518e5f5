"""Ends what a demo's nodes left running, found by the mark in their environment. Linux only, standard library only.

Used by the embedded server when its console is gone, and by the console when its server is.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from remote_agent.protocol.framing import ProtocolError
from remote_agent.protocol.messages import HelloParams, ShutdownParams
from remote_agent.protocol.peer import ErrorReply, Peer, Reply

MARK = "GLOWPLUG_DEMO"
"""Environment variable that every process of a demo's nodes carries; its value names the demo."""

_ASK_S = 5.0
EXEC_LOOKS, EXEC_LOOK_S = 5, 0.002


def end_nodes(state_directories: Sequence[Path], mark: str, grace_s: float = 8.0) -> tuple[str, ...]:
    """Shut every agent down and return what had to be killed or would not end, one line each.

    The agents are asked first; what carries ``mark`` after ``grace_s`` gets SIGTERM, then SIGKILL.
    Where no agent was there to ask, there is nothing to wait for.
    """
    problems: list[str] = []
    asked = [_ask_to_end(directory, problems) for directory in state_directories]
    if _wait_until_gone(mark, grace_s if any(asked) else 0.0):
        return ()
    for number, patience_s in ((signal.SIGTERM, 2.0), (signal.SIGKILL, 5.0)):
        for pid in marked_processes(mark):
            problems.append(f"process {pid} ({_name(pid)}) did not end by itself: {number.name} sent")
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        if _wait_until_gone(mark, patience_s):
            return tuple(problems)
    left = ", ".join(str(pid) for pid in marked_processes(mark))
    return (*problems, f"still running: {left}")


def marked_processes(mark: str) -> tuple[int, ...]:
    """Return the pid of every living process of this user that carries ``mark``; zombies are not living."""
    entry = f"{MARK}={mark}".encode()
    found = []
    for path in Path("/proc").iterdir():
        if not path.name.isdigit():
            continue
        try:
            environment = _environment_of(path)
        except OSError:
            continue
        if entry in environment.split(b"\0"):
            found.append(int(path.name))
    return tuple(sorted(found))


def _environment_of(process: Path) -> bytes:
    """Return a process's environment; one that is being replaced by another program shows none for a moment.

    Raises: OSError if it is gone, or no program at all (a zombie, a thread of the kernel).
    """
    for _ in range(EXEC_LOOKS):
        environment = (process / "environ").read_bytes()
        if environment:
            return environment
        (process / "exe").readlink()
        time.sleep(EXEC_LOOK_S)
    return b""


def _wait_until_gone(mark: str, patience_s: float) -> bool:
    deadline = time.monotonic() + patience_s
    while True:
        _reap()
        if not marked_processes(mark):
            _reap()
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)


def _reap() -> None:
    """Collect children that have ended; a demo's daemons become children of its server."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _ask_to_end(state_directory: Path, problems: list[str]) -> bool:
    """Whether there was an agent that took the request."""
    try:
        with _connected(state_directory) as conversation:
            peer = Peer()
            _request(conversation, peer, "hello", HelloParams("glowplug-demo"))
            _request(conversation, peer, "shutdown", ShutdownParams(keeper=True, force=True))
    except FileNotFoundError:
        return False  # it never ran
    except (OSError, ProtocolError) as error:
        problems.append(f"{state_directory}: the agent could not be asked to end: {error}")
        return False
    return True


def _connected(state_directory: Path) -> socket.socket:
    """Connect through the directory's descriptor: a socket's own path is at most 107 bytes long."""
    directory = os.open(state_directory / "run", os.O_RDONLY | os.O_DIRECTORY)
    try:
        conversation = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        conversation.settimeout(_ASK_S)
        try:
            conversation.connect(f"/proc/self/fd/{directory}/control.sock")
        except BaseException:
            conversation.close()
            raise
        return conversation
    finally:
        os.close(directory)


def _request(conversation: socket.socket, peer: Peer, method: str, params: object) -> None:
    ident, data = peer.request(method, params)
    conversation.sendall(data)
    _receive(conversation, peer, lambda message: isinstance(message, (Reply, ErrorReply)) and message.id == ident)


def _receive(conversation: socket.socket, peer: Peer, wanted: Callable[[object], bool]) -> None:
    deadline = time.monotonic() + _ASK_S
    while time.monotonic() < deadline:
        data = conversation.recv(65536)
        if not data or any(wanted(message) for message in peer.feed(data)):
            return
    raise TimeoutError("no answer")


def _name(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return "ended"
    return b" ".join(words[:6]).decode("utf-8", "replace").strip()
