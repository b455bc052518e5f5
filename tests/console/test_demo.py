"""The embedded fleet: what it writes, whom it lets in, and that it leaves nothing. Its nodes warm nothing here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Self

import pytest
from safetensors import safe_open

from console.cli import run
from console.demo import DemoSettings, EmbeddedFleet, _read_line, write_agent
from console.demo_model import LlamaShape, write_checkpoint
from console.demo_teardown import marked_processes
from console.errors import NodeUnreachable, UsageError
from console.fleet import Fleet
from console.links import real_links
from console.transports.gate import Gate
from remote_agent.protocol.messages import Actor, Probe

TINY = LlamaShape(hidden=32, intermediate=64, layers=2, heads=2, vocabulary=128)


def checkpoint(directory: Path) -> Path:
    write_checkpoint(directory / "tiny", TINY)
    return directory / "tiny"


async def probe_all(demo: EmbeddedFleet) -> dict[str, Probe]:
    gate = Gate.create(demo.locations, {"HOME": str(demo.directory)})
    links = real_links(gate)
    async with Fleet(demo.config, demo.locations.history_file, actor=Actor("a", "b"), links=links) as fleet:
        return {name: await fleet.probe(name) for name in fleet.nodes}


def soon(holds: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 40
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


# --- the model and the agent ---------------------------------------------------------


def test_the_checkpoint_is_sharded_indexed_and_the_same_each_time(tmp_path: Path) -> None:
    """safetensors reads every tensor where the index says, and the same seed gives the same bytes."""
    total = write_checkpoint(tmp_path / "one", TINY)
    write_checkpoint(tmp_path / "two", TINY)
    index = json.loads((tmp_path / "one" / "model.safetensors.index.json").read_text())
    shards = sorted(set(index["weight_map"].values()))

    read = 0
    for shard in shards:
        assert (tmp_path / "one" / shard).read_bytes() == (tmp_path / "two" / shard).read_bytes()
        with safe_open(tmp_path / "one" / shard, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                assert index["weight_map"].pop(name) == shard
                tensor = file.get_tensor(name)
                read += tensor.nbytes
                assert 0 < tensor.float().abs().max() <= 1

    assert len(shards) == 3
    assert index["weight_map"] == {}
    assert read == total == index["metadata"]["total_size"]


def test_another_seed_gives_other_weights(tmp_path: Path) -> None:
    """The weights are random, not constant."""
    write_checkpoint(tmp_path / "one", TINY, seed=1)
    write_checkpoint(tmp_path / "two", TINY, seed=2)

    name = "model-00001-of-00003.safetensors"
    assert (tmp_path / "one" / name).read_bytes() != (tmp_path / "two" / name).read_bytes()


def test_the_agent_is_one_file_that_any_python_runs(tmp_path: Path) -> None:
    """The nodes get the agent as hosts do; nothing is found beside it."""
    agent = write_agent(tmp_path / "agent.pyz")

    told = subprocess.run([sys.executable, "-I", agent, "--version"], capture_output=True, text=True, check=True)

    assert told.stdout.startswith("glowplug-agent ")


# --- refusals ------------------------------------------------------------------------


def test_without_torch_it_says_what_to_install(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A Python without torch is named in one line, exit code 2, before anything is set up."""
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n', encoding="utf-8")
    bare.chmod(0o755)

    assert run(["demo", "--headless", "--python", str(bare), "--directory", str(tmp_path / "d")]) == 2

    captured = capsys.readouterr()
    assert "install the 'local' extra" in captured.err
    assert captured.out == ""
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (DemoSettings(model=Path("/no/such/model")), "no such checkpoint"),
        (DemoSettings(python=("/no/such/python",)), "can't be run"),
        (DemoSettings(directory=Path("/tmp/it's here")), "single quote"),
    ],
)
def test_what_cannot_be_used_is_refused_before_the_start(settings: DemoSettings, words: str) -> None:
    """One line that names the thing."""
    with pytest.raises(UsageError, match=words), EmbeddedFleet(settings):
        pass


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("exit 0", "is no Python"),
        ("echo broken loader >&2; exit 127", "ended with 127 and said: broken loader"),
        (f'exec env PYTHONPATH=$(dirname "$0")/broken {sys.executable} "$@"', r"transformers \(OSError: no libfoo\)"),
    ],
)
def test_a_python_that_cannot_do_it_is_named_at_once(tmp_path: Path, script: str, words: str) -> None:
    """What is no Python, and one whose packages are there but don't load, are refused before anything is made."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    python.chmod(0o755)
    for name in ("torch", "transformers", "safetensors"):
        (tmp_path / "broken" / name).mkdir(parents=True)
        (tmp_path / "broken" / name / "__init__.py").touch()
    (tmp_path / "broken" / "transformers" / "__init__.py").write_text("raise OSError('no libfoo')")

    with (
        pytest.raises(UsageError, match=words) as refused,
        EmbeddedFleet(DemoSettings(python=(str(python),), directory=tmp_path / "d")),
    ):
        pass

    assert str(python) in str(refused.value)
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize("place", ["file", "file/below", "a" * 300, "~no-such-user/here"])
def test_a_directory_that_cannot_be_one_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """A file, something below a file, a name too long, a home that is none: the option and the path are named."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()

    with (
        pytest.raises(UsageError, match=r"--directory .*can't be used: ") as refused,
        EmbeddedFleet(DemoSettings(directory=Path(place))),
    ):
        pass

    assert "Errno" not in str(refused.value)


def test_a_line_that_never_comes_is_waited_for_no_longer_than_said() -> None:
    """What has come is returned; a whole line at once."""
    reading, writing = os.pipe()
    os.write(writing, b"half")
    assert _read_line(reading, 0.0) == b""
    assert _read_line(reading, 0.01) == b"half"
    os.write(writing, b"whole\n")
    assert _read_line(reading, 60.0) == b"whole\n"
    os.close(writing)
    assert _read_line(reading, 60.0) == b""
    os.close(reading)


def test_a_directory_with_other_files_is_left_alone(tmp_path: Path) -> None:
    """The demo writes only where it may later be asked to clean up."""
    (tmp_path / "thesis.tex").write_text("mine")

    with pytest.raises(UsageError, match="other files"), EmbeddedFleet(DemoSettings(directory=tmp_path)):
        pass

    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


# --- the nodes -----------------------------------------------------------------------


async def test_two_demos_at_once_are_strangers_to_each_other(tmp_path: Path) -> None:
    """Each has its own server, keys and nodes; one's key opens nothing of the other."""
    model = checkpoint(tmp_path)
    with EmbeddedFleet(DemoSettings(nodes=1, model=model)) as one, EmbeddedFleet(DemoSettings(2, model)) as other:
        assert list(await probe_all(one)) == ["demo-1"]
        assert list(await probe_all(other)) == ["demo-1", "demo-2"]
        (node,) = one.config.nodes
        crossed = replace(node, port=other.config.nodes[0].port, connect_timeout_s=5.0)
        one.config = replace(one.config, nodes=(crossed,))
        with pytest.raises(NodeUnreachable, match="host key"):
            await probe_all(one)
        directories = (one.directory, other.directory)
        marks = (one._mark, other._mark)
        assert all(marked_processes(mark) for mark in marks)

    assert not any(directory.exists() for directory in directories)
    assert not any(marked_processes(mark) for mark in marks)
    assert one.problems == other.problems == ()


async def test_nodes_write_inside_their_own_homes(tmp_path: Path) -> None:
    """Every variable that names a place to write names one inside the demo's directory."""
    with EmbeddedFleet(DemoSettings(1, checkpoint(tmp_path), tmp_path / "demo")) as demo:
        await probe_all(demo)
        (agentd, *_) = marked_processes(demo._mark)
        content = Path(f"/proc/{agentd}/environ").read_bytes().decode().split("\0")
        environment = dict(entry.split("=", 1) for entry in content if entry)

    places = [key for key in environment if key.endswith(("_HOME", "_DIR", "_PATH")) or key in ("HOME", "TMPDIR")]
    assert {"HOME", "TMPDIR", "XDG_STATE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "HF_HOME"} <= set(places)
    for key in set(places) - {"LD_LIBRARY_PATH"}:
        assert environment[key].startswith(str(tmp_path / "demo")), key
    assert (tmp_path / "demo" / "history.db").exists()
    assert (tmp_path / "demo" / "nodes" / "demo-1" / "state").is_dir()


async def test_a_directory_is_used_by_one_demo_at_a_time_and_again_later(tmp_path: Path) -> None:
    """The second is refused while the first runs; afterwards history and model are still there."""
    settings = DemoSettings(1, checkpoint(tmp_path), tmp_path / "demo")
    with EmbeddedFleet(settings) as demo:
        await probe_all(demo)
        with pytest.raises(UsageError, match="another demo"), EmbeddedFleet(settings):
            pass
        earlier = demo.config.nodes

    with EmbeddedFleet(settings) as again:
        assert await probe_all(again)
        assert again.config.nodes != earlier, "fresh keys and another port"


async def test_when_the_server_is_killed_its_nodes_end_all_the_same(tmp_path: Path) -> None:
    """The console does what its server can't do any more."""
    with EmbeddedFleet(DemoSettings(1, checkpoint(tmp_path))) as demo:
        await probe_all(demo)
        assert demo._server is not None
        demo._server.kill()
        demo._server.wait()
        assert marked_processes(demo._mark)

    assert marked_processes(demo._mark) == ()
    assert not demo.directory.exists()


def test_a_demo_without_a_screen_ends_when_its_server_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody can be reached any more, which is said at once, and exit code 3; the nodes end."""
    begun: list[EmbeddedFleet] = []
    start = EmbeddedFleet._start_server

    def start_and_kill(demo: EmbeddedFleet) -> object:
        begun.append(demo)
        ready = start(demo)
        assert demo._server is not None
        demo._server.kill()
        return ready

    monkeypatch.setattr(EmbeddedFleet, "_start_server", start_and_kill)

    assert run(["demo", "--headless", "--nodes", "1", "--model", str(checkpoint(tmp_path))]) == 3

    assert "the embedded SSH server was killed by SIGKILL" in capsys.readouterr().err
    (demo,) = begun
    assert marked_processes(demo._mark) == ()
    assert not demo.directory.exists()


def test_when_the_console_is_killed_its_nodes_end_all_the_same(tmp_path: Path) -> None:
    """SIGKILL leaves nobody to clean up but the server, which sees its lifeline end."""
    with Console(checkpoint(tmp_path), None) as console:
        console.kill()

        soon(lambda: not marked_processes(console.mark), "nodes are still running")
        soon(lambda: not console.directory.exists(), "the temporary directory is still there")


def test_what_a_console_and_server_killed_together_leave_is_ended_by_the_next_demo(tmp_path: Path) -> None:
    """Nobody is left to clean up, so a later demo does, in whatever directory it runs itself."""
    model = checkpoint(tmp_path)
    with Console(model, None) as console:
        console.kill_server()
        console.kill()
        assert marked_processes(console.mark)

        with EmbeddedFleet(DemoSettings(1, model)) as demo:
            assert marked_processes(console.mark) == ()
            assert not console.directory.exists()
            assert demo.directory.exists()


async def test_a_named_directory_is_taken_over_once_nobody_is_left_to_end_what_was_in_it(tmp_path: Path) -> None:
    """While the server of a killed console ends its nodes there, another demo's would be ended with them."""
    settings = DemoSettings(1, checkpoint(tmp_path), tmp_path / "demo")
    with Console(settings.model, settings.directory) as console:
        os.kill(console.server, signal.SIGSTOP)
        console.kill()
        with pytest.raises(UsageError, match="another demo"), EmbeddedFleet(settings):
            pass
        console.kill_server()

        with EmbeddedFleet(settings) as demo:
            assert marked_processes(console.mark) == ()
            assert await probe_all(demo)


class Console:
    """A demo in a process of its own, its one node's agent running; killed at the end if it was not before."""

    def __init__(self, model: Path | None, directory: Path | None) -> None:
        program = """
import asyncio, sys
from pathlib import Path
from console.demo import DemoSettings, EmbeddedFleet
from tests.console.test_demo import probe_all
model, directory = (Path(word) if word else None for word in sys.argv[1:])
with EmbeddedFleet(DemoSettings(1, model, directory)) as demo:
    asyncio.run(probe_all(demo))
    print(demo._mark, demo._server.pid, demo.directory, flush=True)
    sys.stdin.read()
"""
        self._process = subprocess.Popen(
            [sys.executable, "-c", program, str(model or ""), str(directory or "")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )
        assert self._process.stdout is not None
        self.mark, server, place = self._process.stdout.readline().split()
        self.server, self.directory = int(server), Path(place)
        assert marked_processes(self.mark)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def kill_server(self) -> None:
        """Kill the server and wait until it holds nothing; somebody else may have to reap it."""
        os.kill(self.server, signal.SIGKILL)
        soon(lambda: not any(Path(f"/proc/{self.server}/fd").glob("*")), "the server is still there")
