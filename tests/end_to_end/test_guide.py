"""The operator's guide, run word for word: three served nodes behind a real HAProxy, and requests all the time."""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from console.demo_model import LlamaShape, write_checkpoint
from console.hooks.haproxy.protocol import State
from db import rollouts
from db.queries import History
from db.rollout_store import lease_of
from tests.console.networks import Network
from tests.console.sshd import free_port, until
from tests.end_to_end.consoles import Console
from tests.end_to_end.guide import Guide, missing
from tests.end_to_end.haproxy import LoadBalancer
from tests.end_to_end.hosts import REPOSITORY, OwnHost, Said, Workstation
from tests.end_to_end.requests import Answer, Client, shares, texts_of

pytestmark = [pytest.mark.ssh, pytest.mark.timeout(300)]

NODES = ("gpu-1", "gpu-2", "gpu-3")
NAME = "llama"
PROMPT = list(range(1, 9))
SHAPE = LlamaShape(hidden=32, intermediate=48, layers=2, heads=4, vocabulary=128)
PATIENCE_S = 60.0


@dataclass(frozen=True)
class Place:
    """Where the guide is followed: its text with this place's addresses and paths, and a terminal to type it into."""

    guide: Guide
    workstation: Workstation
    balancer_folder: Path
    port: int

    def type(self, step: int, block: int = 0) -> Said:
        """Run one block of a step's commands as it stands there. Fails if one of them fails."""
        said = self.workstation.shell(self.guide.commands(step)[block])
        assert said.code == 0, (step, said)
        return said

    def begin(self, step: int, block: int = 0) -> Console:
        """Run one block in a terminal of its own, which is its last command's; `Console.pid` is that."""
        *before, last = self.guide.commands(step)[block].splitlines()
        script = "\n".join([*before, f"exec {last}"])
        work = self.workstation
        return Console(script, program=("sh", "-e", "-c"), directory=work.directory, environ=work.environ)

    def shows(self, step: int, said: str, block: int = 0) -> None:
        """Fail unless the lines that the guide shows there were said."""
        lines = missing(self.guide.outputs(step)[block], said)
        assert not lines, f"step {step} shows {lines}, and there is: {said}"


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[OwnHost, str]]]:
    """Three hosts, each on a network of its own, and the address at which this machine finds each."""
    network = Network()
    made: dict[str, tuple[OwnHost, str]] = {}
    try:
        for name in NODES:
            inside = network.host()
            host = OwnHost(tmp_path_factory.mktemp(name), shell=f"{' '.join(inside.inside)} /bin/sh")
            made[name] = host, inside.address
            host.start()
        yield made
    finally:
        for host, _ in made.values():
            host.close()
        network.close()


@pytest.fixture(scope="module")
def place(hosts: dict[str, tuple[OwnHost, str]], tmp_path_factory: pytest.TempPathFactory) -> Place:
    """An operator's machine, two checkpoints, and the guide with the names that its places have here."""
    folder = tmp_path_factory.mktemp("work")
    balancer = Path(tempfile.mkdtemp(prefix="haproxy-"))  # a socket's path has at most 107 bytes
    workstation, port = Workstation(folder / "workstation"), free_port()
    for seed in (1, 2):
        write_checkpoint(folder / f"llama-v{seed}", SHAPE, seed)
    here = {
        "/etc/haproxy": str(folder / "haproxy"),
        "/etc/glowplug": str(folder / "glowplug"),
        "/run/haproxy/admin.sock": str(balancer / "admin.sock"),
        "/opt/venv/bin/python": sys.executable,
        "/models/": f"{folder}/",
        "docs/examples": str(REPOSITORY / "docs" / "examples"),
        "bind :8080": f"bind 127.0.0.1:{port}",
    }
    for number, (name, (host, address)) in enumerate(hosts.items(), start=1):
        workstation.know(host, name)
        here[f"10.0.0.1{number}:"] = f"{address}:"
    workstation.environ["GLOWPLUG_CONFIG"] = str(folder / "glowplug" / "fleet.toml")  # as step 2 exports it
    return Place(Guide(here), workstation, balancer, port)


@pytest.fixture(scope="module")
def balancer(place: Place) -> Iterator[LoadBalancer]:
    """Steps 1 to 3: HAProxy, three nodes that serve the first version, and a rollout's settings."""
    (config,) = place.guide.write_files(1)
    place.type(1)
    place.guide.write_files(2)
    folder = place.balancer_folder
    with LoadBalancer(folder, config.read_text(), folder / "admin.sock", place.port, NAME) as running:
        place.type(2)
        place.guide.write_files(3)
        place.type(3)
        until(lambda: all(running.server(name).status == "UP" for name in NODES), "all nodes are UP", PATIENCE_S)
        yield running


def test_a_canary_fails_its_gate_is_mended_and_all_nodes_follow_while_requests_go_on(
    place: Place, balancer: LoadBalancer
) -> None:
    """Steps 4 to 8: no request fails, nobody who is drained gets one, and shares are as the weights."""
    with Client(balancer, NAME, PROMPT) as client:
        place.shows(4, place.type(4).out)
        place.type(4, 1)
        started = place.begin(5)
        started.until_said("gpu-1: backed out")
        place.shows(5, "\n".join(started.lines))
        place.shows(5, place.type(5, 1).out, 1)
        assert client.weights() == dict.fromkeys(NODES, 100)

        place.shows(6, place.type(6).out)
        started.until_said("paused: after batch 1")
        place.shows(7, "\n".join(started.lines))
        place.type(7)
        code, _ = started.end()
        place.shows(7, "\n".join(started.lines), 1)
    assert code == 0
    place.shows(8, place.type(8).out)

    answers = client.answers
    assert [one for one in answers if one.server is None] == []
    assert [one for one in answers if one.is_steady and one.server not in one.weights] == []
    before, after = texts_of(answers, NODES[0])
    assert [texts_of(answers, name) for name in NODES] == [[before, after]] * 3
    shifts = shifts_of(place)
    for name in NODES:
        first_ns = next(one.answered_ns for one in answers if (one.server, one.text) == (name, after))
        assert first_ns > shifts[name], f"{name} was asked before it was to be"
        for weight in (10, 50):
            compare_shares(answers, {**dict.fromkeys(NODES, 100), name: weight})


def test_a_rollout_whose_console_died_is_taken_over_and_aborted_and_all_is_as_it_was(
    place: Place, balancer: LoadBalancer
) -> None:
    """Steps 9 to 11, while the canary is given its traffic: it serves its former version again, by its whole weight."""

    def is_being_shifted() -> bool:
        server = balancer.server(NODES[0])
        return (server.state, server.weight) == (State.READY, 10)

    with Client(balancer, NAME, PROMPT) as client:
        until(lambda: len(client.answers) > len(NODES), "all have answered", PATIENCE_S)
        started = place.begin(9)
        until(is_being_shifted, "the canary gets traffic", PATIENCE_S)
        started.signal(signal.SIGKILL)
        assert started.end()[0] == -signal.SIGKILL
        until(lambda: balancer.server(NODES[0]).state is State.DRAIN, "its hook takes the canary out again", PATIENCE_S)
        until(lambda: is_free(place), "its lease runs out", PATIENCE_S)
        place.shows(10, place.type(10).out)

        resumed = place.begin(10, 1)
        until(is_being_shifted, "the canary gets traffic again", PATIENCE_S)
        place.type(11)
        assert resumed.end()[0] == 4
        place.shows(11, "\n".join(resumed.lines))
        shifted = len(client.answers)
        until(lambda: len(client.answers) > shifted + 2 * len(NODES), "all have answered", PATIENCE_S)

    assert [one for one in client.answers if one.server is None] == []
    assert [one for one in client.answers if one.is_steady and one.server not in one.weights] == []
    assert client.weights() == dict.fromkeys(NODES, 100)
    texts = [texts_of(client.answers, name) for name in NODES]
    assert texts[1] == texts[2]
    assert len(texts[1]) == 1
    assert (texts[0][:1], texts[0][-1:]) == (texts[1], texts[1])


def compare_shares(answers: Sequence[Answer], weights: dict[str, int]) -> None:
    """Fail unless all got their shares, to two requests, while these were the weights."""
    counts = shares(answers)[tuple(sorted(weights.items()))]
    for name, weight in weights.items():
        expected = counts.total() * weight / sum(weights.values())
        assert abs(counts[name] - expected) <= 2, (weights, counts)


def is_free(place: Place) -> bool:
    with History(history_of(place)) as history:
        record = rollouts.read(history, NAME)
    assert record is not None
    return lease_of(record.row, time.time_ns()) is None


def shifts_of(place: Place) -> dict[str, int]:
    """Return when each node was last to be given its traffic, as Unix time in nanoseconds."""
    with History(history_of(place)) as history:
        record = rollouts.read(history, NAME)
    assert record is not None
    wanted = [one for one in record.timeline if (one.kind, one.what) == ("intent", "RunHook") and one.node]
    return {str(one.node): one.t_wall_ns for one in wanted}


def history_of(place: Place) -> Path:
    return place.workstation.directory / "data" / "glowplug" / "history.db"
