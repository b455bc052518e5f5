"""Real keepers, and descriptors to give them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from remote_agent.agentd.paths import StateDir
from remote_agent.keeper.client import KeeperAddress, ask, tell_keeper
from tests.remote_agent.agentd.agents import eventually

DEVICES = ("nvidiactl", "nvidia0", "nvidia7")

NOBODY = 65534

Keep = Callable[[], "subprocess.Popen[bytes]"]


def answering(state: StateDir) -> str:
    """Return what the keeper says of itself, once it does."""
    return eventually(lambda: tell_keeper(state, "status"), "the keeper answers") or ""


def open_in(pid: int) -> list[str]:
    """Return what a process has open."""
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.append(str(link.readlink()))
        except FileNotFoundError:
            pass  # closed just now
    return found


def at_rest(pid: int) -> int:
    """Return how many descriptors a keeper has open once nobody is connected to it."""

    def look() -> list[str]:
        found = open_in(pid)
        return found if sum(target.startswith("socket:") for target in found) == 1 else []

    return len(eventually(look, "the listener is the keeper's only socket"))


@contextmanager
def memory(*contents: bytes) -> Iterator[list[int]]:
    """Give a descriptor of memory for each of ``contents``."""
    made = [os.memfd_create("test", os.MFD_CLOEXEC) for _ in contents]
    try:
        for descriptor, content in zip(made, contents, strict=True):
            os.write(descriptor, content)
        yield made
    finally:
        for descriptor in made:
            os.close(descriptor)


def put(address: KeeperAddress, name: str, *contents: bytes) -> None:
    """Give a keeper a resident of that content; nothing of it stays open here."""
    with memory(*contents) as descriptors:
        ask(address, f"put {name}", descriptors)


def content_of(descriptor: int) -> bytes:
    return os.pread(descriptor, 1 << 20, 0)


@contextmanager
def someone_else(groups: tuple[int, ...] = ()) -> Iterator[None]:
    """Be another user for a while."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    before = os.getgroups()
    os.setgroups(groups)
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(before)
