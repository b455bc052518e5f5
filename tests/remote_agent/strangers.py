"""What a socket says to a process of another user, even where its directory lets that one through."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from tests.remote_agent.agentd.agents import DEADLINE_S

STRANGER = 12345
"""A user id that nobody has."""


def said_to_a_stranger(folder: Path, name: str) -> bytes:
    """Return the first bytes that the socket ``name`` in a private ``folder`` says, or none where it closes at once."""
    directory, (reading, writing) = os.open(folder, os.O_RDONLY), os.pipe()
    folder.chmod(0o755)
    (folder / name).chmod(0o777)
    stranger = os.fork()
    if stranger == 0:
        code = 1
        try:
            os.write(writing, _ask(directory, name))
            code = 0
        finally:
            os._exit(code)
    os.close(directory)
    os.close(writing)
    with open(reading, "rb") as pipe:
        said = pipe.read()
    _, status = os.waitpid(stranger, 0)
    folder.chmod(0o700)
    assert os.waitstatus_to_exitcode(status) == 0, "it could not be asked"
    return said


def _ask(directory: int, name: str) -> bytes:
    os.fchdir(directory)
    os.setgroups([])
    os.setresgid(STRANGER, STRANGER, STRANGER)
    os.setresuid(STRANGER, STRANGER, STRANGER)
    with socket.socket(socket.AF_UNIX) as link:
        link.settimeout(DEADLINE_S)
        link.connect(name)
        return link.recv(256)
