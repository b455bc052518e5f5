"""What a keeper's client makes of answers that come torn; the keeper's end is this process's own."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from remote_agent.errors import KeeperError
from remote_agent.keeper.client import converse
from tests.remote_agent.keeper.keepers import memory


def open_here() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


@contextmanager
def room_for(count: int) -> Iterator[None]:
    """Let this process open no more than ``count`` descriptors for a while."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = [os.dup(0) for _ in range(count)]  # below the last of them everything is taken
    for descriptor in lowest:
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(lowest) + 1, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    ("answer", "room", "words"),
    [(b"ok 2 7\n", 1, "do not fit: this process has too many files open"), (b"ok 3 7\n", 9, "2 of 3 descriptors")],
)
def test_descriptors_that_did_not_all_come_are_no_answer(answer: bytes, room: int, words: str) -> None:
    """Nor a resident that is lost, which would be dropped for everybody; those that came are closed."""
    ours, theirs = socket.socketpair()
    with ours, theirs, memory(b"manifest", b"weights") as descriptors:
        socket.send_fds(theirs, [answer], descriptors)
        before = open_here()
        with room_for(room), pytest.raises(KeeperError, match=words):
            converse(ours, "get llama@cpu")
        assert open_here() == before


def test_something_is_done_while_the_keeper_looks() -> None:
    """After the line was said and before the answer is heard; where it fails, nothing that came is left open."""
    ours, theirs = socket.socketpair()
    with ours, theirs, open("/dev/null", "rb") as one:
        before = open_here()
        heard: list[bytes] = []

        def answer() -> None:
            heard.append(theirs.recv(100))
            socket.send_fds(theirs, [b"ok 1 9\n"], [one.fileno()])

        reply = converse(ours, "show llama@cpu", meanwhile=answer)
        assert (heard, len(reply.descriptors)) == ([b"show llama@cpu\n"], 1)
        reply.close()
        with pytest.raises(KeyError):
            converse(ours, "show llama@cpu", meanwhile=lambda: {}["none"])
        assert open_here() == before
