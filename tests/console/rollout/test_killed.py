"""Controllers killed by SIGKILL at every point of a rollout, and the ones that take over."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from console.rollout.states import NodeState, Phase, RolloutState
from tests.console.rollout.fakes import Desk
from tests.console.rollout.killed import Order, ask, read_world
from tests.console.rollout.world import gate, rules

pytestmark = pytest.mark.faults
ROUNDS = 20
POINTS = 48
"""As many as a rollout of three nodes surely has, unless it is aborted early."""

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def forker() -> Iterator[subprocess.Popen[str]]:
    """The process that has everything imported, and forks controllers."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.console.rollout.killed"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    )
    yield process
    process.communicate(timeout=30)


def carried_out(forker: subprocess.Popen[str], order: Order) -> int:
    assert forker.stdin is not None
    assert forker.stdout is not None
    stdin, stdout = forker.stdin, forker.stdout

    def write(text: str) -> None:
        stdin.write(text)
        stdin.flush()

    return ask(order, write, stdout.readline)


def next_verb(state: RolloutState, draw: random.Random) -> str:
    if draw.random() < 0.15:
        return "abort"
    return "promote" if any(row.failed_at_gate for row in state.nodes) else "resume"


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_a_rollout_outlives_its_controllers(forker: subprocess.Popen[str], tmp_path: Path, seed: int) -> None:
    """None is shifted that was not warm, none forgotten out of traffic, nothing done that was not stored before."""
    draw = random.Random(seed)
    desk = Desk(tmp_path / "history.db", rules(gates=(gate(),), max_failures=2), (("a",), ("b", "c")), lease_s=0.2)
    world = tmp_path / "world"
    kills, verb, statuses = 2, "", []
    while not desk.state().phase.is_over:
        # Spread over the whole rollout, so that the rounds together die at points of every kind.
        kill_at = 1 + (seed * POINTS // ROUNDS + draw.randrange(POINTS // ROUNDS + 1)) // (3 - kills) if kills else 0
        statuses.append(carried_out(forker, Order(str(desk.path), str(world), desk.uid, seed, kill_at, verb)))
        kills -= kills > 0
        verb = next_verb(desk.state(), draw)
        assert len(statuses) < 30
    record, state, deeds = desk.read(), desk.state(), read_world(world)
    desk.close()

    assert set(statuses) <= {0, -signal.SIGKILL}
    wanted = {(one.what, one.node, one.attempt) for one in record.timeline if one.kind == "intent"}
    assert {(one["what"], one["node"], one["attempt"]) for one in deeds} <= wanted
    traffic: dict[object, object] = {}
    warm = set()
    for one in deeds:
        attempt = (one["node"], one["attempt"])
        if one["deed"] == "warm":
            warm.add(attempt)
        elif one["deed"] in ("drain", "shift", "back"):
            assert one["deed"] != "shift" or attempt in warm
            traffic[one["node"]] = one["deed"]
    assert "drain" not in traffic.values()
    for row in state.nodes:
        assert (row.state is NodeState.READY) == (traffic.get(row.name) == "shift")
        assert not row.is_out
    assert state.phase in (Phase.DONE, Phase.ABORTED)
    open_intents = {one.entry_id for one in record.timeline if one.kind == "intent"}
    assert open_intents == {one.intent_id for one in record.timeline if one.kind == "outcome"}
