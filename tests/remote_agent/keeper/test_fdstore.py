"""systemd's descriptor store, with a stub of the service manager: what is said to it, and what comes back of it."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from remote_agent.agentd.paths import StateDir
from remote_agent.keeper.client import KeeperAddress, Listed, ask, lease, list_residents
from tests.remote_agent.agentd.agents import DEADLINE_S, REPOSITORY
from tests.remote_agent.keeper.keepers import answering, content_of, memory, put

STARTER = """
import os, sys
count, names = sys.argv[1], sys.argv[2]
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS=count, LISTEN_FDNAMES=names)
os.execv(sys.executable, [sys.executable, "-m", "remote_agent", "keeper", *sys.argv[3:]])
"""
"""What systemd does between fork and exec: the pid is the service's own."""


class Manager:
    """The notify socket of a service manager, and the store behind it."""

    def __init__(self, path: Path) -> None:
        self.link = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.link.bind(str(path))
        self.link.settimeout(DEADLINE_S)
        self.path = path
        self.stored: dict[str, int] = {}

    def take(self) -> dict[str, str]:
        """Take one message in, as systemd does, and return its fields."""
        text, descriptors, _, _ = socket.recv_fds(self.link, 4096, 4)
        fields = dict(line.split("=", 1) for line in text.decode().splitlines())
        if fields.get("FDSTORE") == "1":
            (self.stored[fields["FDNAME"]],) = descriptors
        elif fields.get("FDSTOREREMOVE") == "1":
            os.close(self.stored.pop(fields["FDNAME"]))
        return fields

    def fill_queue(self) -> None:
        """Let nothing more be said to it."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as link:
            link.setblocking(False)
            link.connect(str(self.path))
            while select.select([], [link], [], 0)[1]:
                link.send(b"STATUS=")

    def close(self) -> None:
        self.link.close()
        for descriptor in self.stored.values():
            os.close(descriptor)


class Service:
    """Starts keepers as the manager would."""

    def __init__(self, manager: Manager, state: StateDir, devices: Path) -> None:
        self.manager, self._state, self._devices = manager, state, devices
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *stored: tuple[str, int]) -> KeeperAddress:
        """Start a keeper with these descriptors from 3 on and return where it answers."""
        arguments = ["--state-dir", str(self._state.root), "--devices", str(self._devices)]
        names = ":".join(name for name, _ in stored)
        # Descriptors from 3 on, in this order: duplicates far above do not stand in each other's way.
        far = [os.dup(descriptor) for _, descriptor in stored]
        script = "".join(f"exec {number}<&{descriptor} {descriptor}<&-; " for number, descriptor in enumerate(far, 3))
        self.process = subprocess.Popen(
            [
                "bash",
                "-c",
                f'{script} exec "$@"',
                "bash",
                sys.executable,
                "-c",
                STARTER,
                str(len(far)),
                names,
                *arguments,
            ],
            cwd=REPOSITORY,
            pass_fds=far,
            env={**os.environ, "NOTIFY_SOCKET": str(self.manager.path)},
        )
        for descriptor in far:
            os.close(descriptor)
        answering(self._state)
        return KeeperAddress(self._state)

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(DEADLINE_S)


@pytest.fixture
def service(tmp_path: Path, state: StateDir, devices: Path) -> Iterator[Service]:
    """Return a service whose manager keeps descriptors."""
    service = Service(Manager(tmp_path / "notify"), state, devices)
    yield service
    service.kill()
    service.manager.close()


def test_what_is_put_goes_into_the_store_and_a_drop_takes_it_out(service: Service) -> None:
    """Each descriptor by a name of its own, never polled; before that the keeper says that it is ready."""
    address, manager = service.start(), service.manager
    assert manager.take() == {"READY": "1"}
    put(address, "llama@cpu", b"manifest", b"weights")

    said = [manager.take(), manager.take()]
    assert [fields["FDNAME"] for fields in said] == ["llama@cpu,0,2", "llama@cpu,1,2"]
    assert {fields["FDPOLL"] for fields in said} == {"0"}
    assert [content_of(descriptor) for descriptor in manager.stored.values()] == [b"manifest", b"weights"]
    ask(address, "drop llama@cpu")
    manager.take()
    manager.take()
    assert manager.stored == {}


def test_residents_outlive_a_killed_keeper(service: Service) -> None:
    """The next one has them from the store, in their order, whatever order the store gives them in."""
    manager = service.manager
    address = service.start()
    manager.take()
    put(address, "llama@cpu", b"manifest", b"first", b"second")
    for _ in range(3):
        manager.take()
    service.kill()
    address = service.start(*reversed(manager.stored.items()))

    assert list_residents(address) == (Listed("llama@cpu", 3, ()),)
    link, reply = lease(address, "llama@cpu")
    assert [content_of(descriptor) for descriptor in reply.descriptors] == [b"manifest", b"first", b"second"]
    reply.close()
    link.close()


def test_a_keeper_that_is_made_to_end_leaves_nothing_in_the_store(service: Service) -> None:
    """Or the manager would give the next one what was let go by force."""
    address, manager = service.start(), service.manager
    manager.take()
    put(address, "llama@cpu", b"manifest", b"weights")
    manager.take()
    manager.take()
    link, reply = lease(address, "llama@cpu")
    reply.close()
    ask(address, "stop!")
    link.close()
    manager.take()
    manager.take()

    assert manager.stored == {}
    assert service.process is not None
    assert service.process.wait(DEADLINE_S) == 0


def test_a_manager_that_reads_nothing_holds_nobody_up(service: Service) -> None:
    """What could not be stored is held all the same."""
    address = service.start()
    service.manager.fill_queue()
    put(address, "llama@cpu", b"manifest", b"weights")

    assert list_residents(address) == (Listed("llama@cpu", 2, ()),)


def test_what_is_torn_or_not_ours_is_closed(service: Service) -> None:
    """Half a resident is none, and a descriptor of another kind is not kept open."""
    names = ("half@cpu,0,2", "whole@cpu,1,2", "whole@cpu,0,2", "stored", "bad name,0,2", "odd@cpu,0,2", "odd@cpu,1,3")
    with memory(*(name.encode() for name in names)) as descriptors:
        address = service.start(*zip(names, descriptors, strict=True))

    assert list_residents(address) == (Listed("whole@cpu", 2, ()),)
    assert service.process is not None
    found = [link.readlink().name for link in Path(f"/proc/{service.process.pid}/fd").iterdir()]
    assert sum(name.startswith("memfd:") for name in found) == 2


def test_what_is_meant_for_another_process_is_left_alone(service: Service, state: StateDir) -> None:
    """A child that inherited the variables does not take descriptors for residents."""
    environment = {**os.environ, "LISTEN_PID": "1", "LISTEN_FDS": "1", "LISTEN_FDNAMES": "x,0,2"}
    arguments = ["--state-dir", str(state.root)]
    service.process = subprocess.Popen(
        [sys.executable, "-m", "remote_agent", "keeper", *arguments], cwd=REPOSITORY, env=environment
    )
    answering(state)

    assert list_residents(KeeperAddress(state)) == ()
