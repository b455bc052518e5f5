"""A ProxyCommand's process and sockets: where one of them is not to be had, nothing of the other stays."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from console.errors import NodeUnreachable
from console.transports.ssh_proxy import open_proxy

DESCRIPTORS = Path("/proc/self/fd")


async def test_without_a_descriptor_left_no_process_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three hundred links may well use them up; a command that nobody would end is worse than none."""

    def used_up(*_: object) -> tuple[socket.socket, socket.socket]:
        raise OSError(24, os.strerror(24))

    monkeypatch.setattr(socket, "socketpair", used_up)
    with pytest.raises(OSError, match="Too many open files"):
        await open_proxy("gpu-1", f"touch {tmp_path}/started", {"SHELL": "/bin/sh"})
    monkeypatch.undo()  # a whole command after it: one that was started all the same has run by then
    proxy = await open_proxy("gpu-1", "cat", {"SHELL": "/bin/sh", "PATH": os.environ["PATH"]})
    await proxy.close()

    assert not (tmp_path / "started").exists()


async def test_without_the_shell_no_socket_stays_open(tmp_path: Path) -> None:
    """And it is said which shell there is not."""
    with pytest.raises(NodeUnreachable, match="gpu-1: ProxyCommand: /nowhere/sh: "):
        await open_proxy("gpu-1", "true", {"SHELL": "/nowhere/sh"})
    before = sorted(DESCRIPTORS.iterdir())
    with pytest.raises(NodeUnreachable):
        await open_proxy("gpu-1", "true", {"SHELL": "/nowhere/sh"})

    assert len(sorted(DESCRIPTORS.iterdir())) == len(before)
