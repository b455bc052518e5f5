"""The second socket: other users attach where the file says so, and say nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from remote_agent.agentd.daemon import identity
from remote_agent.agentd.paths import ATTACH_FILE_NAME, StateDir
from remote_agent.errors import KeeperError, KeeperRefusedError
from remote_agent.keeper.access import SOCKET_NAME, Access, AccessError, bind_for_others, read_access
from remote_agent.keeper.client import KeeperAddress, ask, lease, list_residents
from remote_agent.keeper.holdings import LEASES_OF_OTHERS_MAX
from remote_agent.keeper.serving import WAITING_MAX
from tests.remote_agent.agentd.agents import DEADLINE_S, REPOSITORY, eventually
from tests.remote_agent.keeper.keepers import NOBODY, answering, content_of, put, someone_else

A_GROUP = 54321


@pytest.fixture
def entrance() -> Iterator[Path]:
    """Return a directory that every user can enter, unlike those of ``tmp_path``."""
    folder = Path(tempfile.mkdtemp(prefix="glowplug-attach-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def allow(state: StateDir, *lines: str) -> None:
    file = state.root / ATTACH_FILE_NAME
    file.write_text("\n".join(lines))
    file.chmod(0o600)


def others_address(entrance: Path) -> KeeperAddress:
    return KeeperAddress(entrance / SOCKET_NAME)


def test_a_user_on_the_list_attaches_and_controls_nothing(
    address: KeeperAddress, state: StateDir, entrance: Path
) -> None:
    """Memory is lent to them; every word that changes something is refused, by name."""
    put(address, "llama@cpu", b"manifest", b"weights")
    allow(state, f"directory {entrance}", f"uid {NOBODY}")
    eventually((entrance / SOCKET_NAME).is_socket, "the keeper listens for others")

    with someone_else():
        link, reply = lease(others_address(entrance), "llama@cpu")
        for line in ("drop llama@cpu", "drop! llama@cpu", "stop", "stop!", "hold", "release", "status"):
            with pytest.raises(KeeperRefusedError, match=f"{line.split()[0]} is not for you: you may get list show"):
                ask(others_address(entrance), line)
    assert list_residents(others_address(entrance))[0].attached == (os.getpid(),)
    assert content_of(reply.descriptors[1]) == b"weights"
    reply.close()
    link.close()


@pytest.mark.parametrize(("line", "is_in"), [(f"gid {A_GROUP}", True), ("gid 1", False), ("uid 1", False), ("", False)])
def test_a_further_group_counts_and_everybody_else_stays_out(
    address: KeeperAddress, state: StateDir, entrance: Path, line: str, is_in: bool
) -> None:
    """The list is read for each client, so the socket may stand while it changes."""
    allow(state, f"directory {entrance}")
    eventually((entrance / SOCKET_NAME).is_socket, "the keeper listens for others")
    allow(state, f"directory {entrance}", line)

    with someone_else(groups=(A_GROUP,)):
        if is_in:
            assert list_residents(others_address(entrance)) == ()
        else:
            with pytest.raises(KeeperRefusedError, match="not your keeper"):
                list_residents(others_address(entrance))


def test_the_control_socket_is_out_of_reach_for_other_users(address: KeeperAddress, state: StateDir) -> None:
    """Its directory is private, whatever the list says."""
    allow(state, f"uid {NOBODY}")

    with someone_else(), pytest.raises(KeeperError, match="can't be reached"):
        ask(KeeperAddress(state.run / "keeper.sock"), "list")


@pytest.mark.parametrize("what", ["socket", "directory"])
def test_a_socket_that_was_taken_away_comes_back(
    address: KeeperAddress, state: StateDir, entrance: Path, what: str
) -> None:
    """Alone, or with its directory, as a clean-up of /run does."""
    put(address, "llama@cpu", b"manifest", b"weights")
    folder = entrance / "run"
    folder.mkdir(0o755)
    allow(state, f"directory {folder}")
    eventually((folder / SOCKET_NAME).is_socket, "the keeper listens for others")

    if what == "socket":
        (folder / SOCKET_NAME).unlink()
    else:
        shutil.rmtree(folder)
        folder.mkdir(0o755)

    eventually((folder / SOCKET_NAME).is_socket, "the keeper listens again")
    assert [one.name for one in list_residents(others_address(folder))] == ["llama@cpu"]


@pytest.mark.parametrize("line", ["nonsense", "directory /nowhere/at/all", "directory /a\0b", "uid " + "1" * 6000])
def test_a_complaint_that_can_t_be_written_costs_no_resident(state: StateDir, line: str) -> None:
    """A bad line while the log's disk is full; once it is put right, others are let in."""
    allow(state, line)
    with open("/dev/full", "wb") as full:
        arguments = ["--state-dir", str(state.root), "--devices", "/nowhere"]
        process = subprocess.Popen(
            [sys.executable, "-m", "remote_agent", "keeper", *arguments], cwd=REPOSITORY, stderr=full
        )
    try:
        answering(state)
        put(KeeperAddress(state), "llama@cpu", b"manifest", b"weights")
        (state.root / "others").mkdir(0o755)
        allow(state, f"directory {state.root / 'others'}")
        eventually((state.root / "others" / SOCKET_NAME).is_socket, "the keeper listens for others")

        assert [one.name for one in list_residents(KeeperAddress(state))] == ["llama@cpu"]
    finally:
        process.kill()
        process.wait(DEADLINE_S)


def test_without_the_file_nobody_else_has_a_socket(address: KeeperAddress, state: StateDir, entrance: Path) -> None:
    """Taken away, the file takes the socket with it."""
    allow(state, f"directory {entrance}", f"uid {NOBODY}")
    eventually((entrance / SOCKET_NAME).is_socket, "the keeper listens for others")
    (state.root / ATTACH_FILE_NAME).unlink()

    eventually(lambda: not (entrance / SOCKET_NAME).exists(), "the socket is gone")
    assert list_residents(address) == ()


@pytest.mark.parametrize("with_directory", [False, True])
def test_a_removed_socket_is_made_again(
    address: KeeperAddress, state: StateDir, entrance: Path, with_directory: bool
) -> None:
    """What tidies a directory up, or makes it anew, shuts nobody out for ever."""
    folder = entrance / "run"
    folder.mkdir()
    allow(state, f"directory {folder}")
    eventually((folder / SOCKET_NAME).is_socket, "the keeper listens for others")
    (folder / SOCKET_NAME).unlink()
    if with_directory:
        folder.rmdir()
        folder.mkdir()

    eventually((folder / SOCKET_NAME).is_socket, "the keeper listens again")
    assert list_residents(others_address(folder)) == ()


def test_a_socket_that_cannot_be_taken_away_ends_no_keeper(
    address: KeeperAddress, state: StateDir, entrance: Path
) -> None:
    """Nobody is let in by then, and what is held stays."""
    put(address, "llama@cpu", b"manifest", b"weights")
    elsewhere = entrance / "elsewhere"
    elsewhere.mkdir()
    allow(state, f"directory {entrance}")
    eventually((entrance / SOCKET_NAME).is_socket, "the keeper listens for others")
    (entrance / SOCKET_NAME).unlink()
    (entrance / SOCKET_NAME).mkdir()
    allow(state, f"directory {elsewhere}")

    eventually((elsewhere / SOCKET_NAME).is_socket, "the keeper listens elsewhere")
    assert [one.name for one in list_residents(address)] == ["llama@cpu"]


def test_a_list_says_who_and_where(tmp_path: Path) -> None:
    """Comments and blank lines are nobody."""
    file = tmp_path / "attach.allow"
    file.write_text("# servers\n\ndirectory /run/glowplug  # made by tmpfiles.d\nuid 1001\nuid 1002 # vllm\ngid 7\n")
    file.chmod(0o600)

    assert read_access(file) == Access(Path("/run/glowplug"), frozenset((1001, 1002)), frozenset((7,)))
    assert read_access(tmp_path / "nothing") == Access()


@pytest.mark.parametrize(
    "line", ["uid alice", "uid -1", "directory run", "everyone", "uid", "uid ²", f"uid {'9' * 5000}"]
)
def test_a_list_that_is_not_understood_lets_nobody_in(tmp_path: Path, line: str) -> None:
    """The line is named."""
    file = tmp_path / "attach.allow"
    file.write_text(f"uid 1\n{line}\n")
    file.chmod(0o600)

    with pytest.raises(AccessError, match=r"attach\.allow, line 2: "):
        read_access(file)


def test_a_directory_that_cannot_be_is_complained_of_and_the_keeper_goes_on(state: StateDir, devices: Path) -> None:
    """Neither such a line nor a log on a full disk takes the residents away."""
    allow(state, "directory /tmp/zero\0byte")
    arguments = ["--state-dir", str(state.root), "--devices", str(devices)]
    with (
        Path("/dev/full").open("wb") as full,
        subprocess.Popen(
            [sys.executable, "-m", "remote_agent", "keeper", *arguments], cwd=REPOSITORY, stderr=full
        ) as process,
    ):
        try:
            assert answering(state)
            put(KeeperAddress(state), "llama@cpu", b"manifest", b"weights")
            assert [one.name for one in list_residents(KeeperAddress(state))] == ["llama@cpu"]
        finally:
            process.kill()


def test_a_list_that_others_may_write_is_no_list(tmp_path: Path) -> None:
    """Whoever can write it could let themselves in."""
    file = tmp_path / "attach.allow"
    file.write_text("uid 1\n")
    file.chmod(0o666)

    with pytest.raises(AccessError, match="must be written by its owner alone"):
        read_access(file)


def test_a_directory_where_others_could_replace_the_socket_is_refused(entrance: Path) -> None:
    """Weights must not come from whoever was there first; a directory that is not there is named too."""
    entrance.chmod(0o777)
    with pytest.raises(AccessError, match="others could replace the socket"):
        bind_for_others(entrance)
    with pytest.raises(AccessError, match="No such file"):
        bind_for_others(entrance / "missing")


def test_the_socket_has_its_name_only_once_everybody_can_connect(
    entrance: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that is seen before it is open to others would refuse them."""
    seen: list[tuple[bool, int]] = []
    rename = Path.rename

    def look(self: Path, target: Path) -> Path:
        seen.append((target.exists(), self.stat().st_mode & 0o777))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", look)
    listener, bound = bind_for_others(entrance)
    with listener:
        assert bound == identity(entrance / SOCKET_NAME)
        assert seen == [(False, 0o666)]
        assert [entry.name for entry in entrance.iterdir()] == [SOCKET_NAME]


def test_other_users_can_not_take_what_the_owner_needs(address: KeeperAddress, state: StateDir, entrance: Path) -> None:
    """Neither by attaching without end nor by connecting and saying nothing."""
    put(address, "llama@cpu", b"manifest", b"weights")
    allow(state, f"directory {entrance}", f"uid {NOBODY}")
    eventually((entrance / SOCKET_NAME).is_socket, "the keeper listens for others")

    with ExitStack() as stack, address.connect() as waiting:
        with someone_else():
            for _ in range(LEASES_OF_OTHERS_MAX):
                link, reply = lease(others_address(entrance), "llama@cpu")
                stack.enter_context(link)
                reply.close()
            with pytest.raises(KeeperRefusedError, match=f"no room: {LEASES_OF_OTHERS_MAX} of other users"):
                lease(others_address(entrance), "llama@cpu")
            for _ in range(2 * WAITING_MAX):
                stack.enter_context(others_address(entrance).connect())
        waiting.sendall(b"status\n")

        assert waiting.recv(64).startswith(b"ok ")
        link, reply = lease(address, "llama@cpu")
        stack.enter_context(link)
        reply.close()
        with pytest.raises(KeeperRefusedError, match=rf"attached by 193, processes: {os.getpid()}$"):
            ask(address, "drop llama@cpu")
