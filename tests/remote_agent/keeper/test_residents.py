"""What is put into a keeper: it stays, it is lent, it goes when told, and nothing of it is left behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from remote_agent.agentd.paths import StateDir
from remote_agent.errors import KeeperRefusedError
from remote_agent.keeper.client import KeeperAddress, Listed, ask, lease, list_residents, tell_keeper
from remote_agent.keeper.holdings import DESCRIPTORS_MAX, TOTAL_MAX
from tests.remote_agent.agentd.agents import DEADLINE_S, REPOSITORY, eventually
from tests.remote_agent.keeper.keepers import at_rest, content_of, memory, open_in, put

ATTACHER = """
import sys
from pathlib import Path
from remote_agent.agentd.paths import StateDir
from remote_agent.keeper.client import KeeperAddress, lease
link, reply = lease(KeeperAddress(StateDir(Path(sys.argv[1]))), sys.argv[2])
print("attached", flush=True)
sys.stdin.read()
"""


def attached(address: KeeperAddress) -> tuple[int, ...]:
    return tuple(pid for resident in list_residents(address) for pid in resident.attached)


def attach_elsewhere(state: StateDir, name: str) -> subprocess.Popen[bytes]:
    """Return another process that has a resident attached."""
    process = subprocess.Popen(
        [sys.executable, "-c", ATTACHER, str(state.root), name],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"attached\n"
    return process


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate(timeout=DEADLINE_S)


def test_what_is_put_is_given_back_in_its_order(address: KeeperAddress) -> None:
    """Manifest and memory come back as they were, though whoever made them has closed them."""
    put(address, "llama@cpu", b"manifest", b"first", b"second")

    assert list_residents(address) == (Listed("llama@cpu", 3, ()),)
    shown = ask(address, "show llama@cpu")
    link, reply = lease(address, "llama@cpu")
    with link:
        assert [content_of(descriptor) for descriptor in shown.descriptors] == [b"manifest"]
        assert [content_of(descriptor) for descriptor in reply.descriptors] == [b"manifest", b"first", b"second"]
    shown.close()
    reply.close()


def test_what_a_keeper_holds_no_program_inherits(address: KeeperAddress, keeper: int) -> None:
    """Closed on exec from the moment it came."""
    put(address, "llama@cpu", b"manifest", b"weights")
    held = [link.name for link in Path(f"/proc/{keeper}/fd").iterdir() if "memfd:" in str(link.readlink())]
    infos = [Path(f"/proc/{keeper}/fdinfo/{number}").read_text() for number in held]

    assert len(infos) == 2
    assert all(int(re.findall(r"^flags:\s*(\d+)", info, re.MULTILINE)[0], 8) & os.O_CLOEXEC for info in infos)


def test_a_lease_is_as_long_as_its_connection(address: KeeperAddress, keeper: int) -> None:
    """While it is open the resident is not dropped and the refusal names the process; closed, it goes."""
    before = at_rest(keeper)
    put(address, "llama@cpu", b"manifest", b"weights")
    link, reply = lease(address, "llama@cpu")
    reply.close()

    assert attached(address) == (os.getpid(),)
    with pytest.raises(KeeperRefusedError, match=f"llama@cpu is attached by 1, processes: {os.getpid()}"):
        ask(address, "drop llama@cpu")
    link.close()
    eventually(lambda: not attached(address), "the lease ends")
    assert ask(address, "drop llama@cpu").count == 0
    assert at_rest(keeper) == before


def test_the_death_of_an_attacher_ends_its_lease_and_no_other(
    address: KeeperAddress, state: StateDir, keeper: int
) -> None:
    """Nothing is freed and nothing leaks when one of several is killed."""
    put(address, "llama@cpu", b"manifest", b"weights")
    before = at_rest(keeper)
    first, second = attach_elsewhere(state, "llama@cpu"), attach_elsewhere(state, "llama@cpu")
    try:
        assert set(attached(address)) == {first.pid, second.pid}
        end(first)
        eventually(lambda: attached(address) == (second.pid,), "the lease of the dead one ends")
    finally:
        end(first)
        end(second)
    eventually(lambda: not attached(address), "no lease is left")
    assert at_rest(keeper) == before
    assert [one.name for one in list_residents(address)] == ["llama@cpu"]


def test_force_drops_what_is_attached_and_ends_its_leases(address: KeeperAddress, keeper: int) -> None:
    """The attacher hears of it: its connection closes."""
    before = at_rest(keeper)
    put(address, "llama@cpu", b"manifest", b"weights")
    link, reply = lease(address, "llama@cpu")
    with link:
        ask(address, "drop! llama@cpu")
        assert link.recv(1) == b""
    assert content_of(reply.descriptors[1]) == b"weights"
    reply.close()
    assert list_residents(address) == ()
    assert at_rest(keeper) == before


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("get nothing", "no resident 'nothing'"),
        ("show nothing", "no resident 'nothing'"),
        ("drop nothing", "no resident 'nothing'"),
        ("get", "get names a resident"),
        ("list all", "list stands alone"),
        ("put ../../etc", "is no name"),
        ("put twice", "twice is held already"),
        ("put one", "1 descriptors came"),
    ],
)
def test_what_cannot_be_done_is_refused_in_words(address: KeeperAddress, keeper: int, line: str, words: str) -> None:
    """A refusal says why, and what came with it is not kept."""
    put(address, "twice", b"manifest", b"weights")
    before = at_rest(keeper)
    contents = {"put one": [b"m"], "put twice": [b"m", b"w"], "put ../../etc": [b"m", b"w"]}.get(line, [])
    with memory(*contents) as descriptors, pytest.raises(KeeperRefusedError, match=words):
        ask(address, line, descriptors)

    assert [one.name for one in list_residents(address)] == ["twice"]
    assert at_rest(keeper) == before


def test_a_keeper_of_residents_does_not_stop_by_accident(address: KeeperAddress, state: StateDir, keeper: int) -> None:
    """Neither does it release the driver under them; told with force, it ends."""
    put(address, "llama@cpu", b"manifest", b"weights")

    for word in ("stop", "release"):
        assert (tell_keeper(state, word) or "").startswith("error residents are held: 1; drop them first")
    assert tell_keeper(state, "status") == f"ok 3 {keeper}"
    assert tell_keeper(state, "stop!") == f"ok 0 {keeper}"
    eventually(lambda: tell_keeper(state, "status") is None, "the keeper ends")


def test_there_is_an_end_to_what_a_keeper_takes(address: KeeperAddress, keeper: int) -> None:
    """It is full at a number of descriptors that it can hold, and says so."""
    before = at_rest(keeper)
    with memory(*[b"x"] * DESCRIPTORS_MAX) as descriptors:
        for number in range(TOTAL_MAX // DESCRIPTORS_MAX):
            ask(address, f"put model{number}", descriptors)
        with pytest.raises(KeeperRefusedError, match=f"no room: {TOTAL_MAX} of {TOTAL_MAX} descriptors are held"):
            ask(address, "put onemore", descriptors)

        assert len(open_in(keeper)) > TOTAL_MAX
    for resident in list_residents(address):
        ask(address, f"drop {resident.name}")
    assert at_rest(keeper) == before
