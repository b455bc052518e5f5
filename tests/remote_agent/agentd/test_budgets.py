"""What warm models may take of a device: over it a run is refused before any memory is taken, or idle ones go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from remote_agent.agentd.room import check_budgets
from remote_agent.errors import StageError
from remote_agent.keeper.client import KeeperAddress, lease
from remote_agent.protocol.budget import parse_budget
from remote_agent.protocol.messages import Hold, Resident, RunRecord, RunState, StageStatus, Tier
from tests.remote_agent.agentd.agents import Agent, Watcher, eventually, failure_of, stage_of
from tests.remote_agent.agentd.stub_children import UUIDS


@pytest.fixture
def agent(make_agent: Callable[..., Agent]) -> Agent:
    """Return an agent that lets 2500 bytes be held on each device; a stub's model takes 1000."""
    agent = make_agent(orders={"sampler": "ok 1000000000"}, hold_budgets=["2500"], keeper_s=0.05)
    with agent.client() as client:
        eventually(lambda: client.status().probe.gpus, "the sampler reports")  # type: ignore[union-attr]
    return agent


def warm(
    agent: Agent, client: Watcher, file: str, tier: str = "resident", budget: str = "", **hold: object
) -> RunRecord:
    """Warm a model of a file of its own on the first GPU."""
    agent.model = agent.model.with_name(file)
    if not agent.model.exists():
        agent.model.write_bytes(file.encode())
    params = agent.params("bytes:1000", ("cuda:0",), target_tier=tier, hold=Hold(**hold))  # type: ignore[arg-type]
    return client.warm(replace(params, hold_budget=budget))


def held(client: Watcher) -> dict[str, Resident]:
    return {one.run_uid: one for one in client.status().residents}


def test_a_run_over_the_budget_is_refused_with_holder_bytes_and_budget(agent: Agent) -> None:
    """Its worker never gets the word to touch the device; what is there stays."""
    with agent.client("") as client:
        kept = warm(agent, client, "first", owner="team-a")
        waiting = warm(agent, client, "second", "standby", owner="team-b")
        refused = warm(agent, client, "third")
        names = held(client).keys()

    failure = failure_of(refused)
    assert (failure.code, failure.stage) == ("over_budget", "preflight")
    assert failure.detail == (
        f"{UUIDS[0]}: needs 1000 bytes; of the 2500 bytes that may be held there (hold_budget 2500) "
        "2000 bytes are taken by tiny of team-a (1000 bytes), tiny of team-b (1000 bytes); "
        "release one, raise hold_budget, or set hold.make_room"
    )
    assert stage_of(refused, "context").status is StageStatus.SKIPPED
    assert names == {kept.run_uid, waiting.run_uid}


def test_what_was_not_used_for_longest_goes_for_a_run_that_may_make_room(agent: Agent) -> None:
    """A resident that somebody attached to meanwhile counts as used; an idle standby goes like any other."""
    with agent.client("") as client:
        first, second = warm(agent, client, "first"), warm(agent, client, "second", "standby")
        link, reply = lease(KeeperAddress(agent.state), held(client)[first.run_uid].name or "")
        eventually(lambda: held(client)[first.run_uid].attached, "it is seen to be attached")
        reply.close()
        link.close()
        eventually(lambda: not held(client)[first.run_uid].attached, "it is seen to be free")
        third = warm(agent, client, "third", make_room=True)
        left = held(client)

    assert third.state is RunState.READY
    assert left.keys() == {first.run_uid, third.run_uid}
    assert second.tier_to is Tier.STANDBY


def test_what_is_attached_never_goes_for_a_budget(agent: Agent) -> None:
    """Nothing goes where not enough can go."""
    with agent.client("") as client:
        runs = [warm(agent, client, name) for name in ("first", "second")]
        links = [lease(KeeperAddress(agent.state), one.name or "") for one in held(client).values()]
        eventually(lambda: all(one.attached for one in held(client).values()), "they are seen to be attached")
        refused = warm(agent, client, "third", make_room=True)
        left = held(client).keys()
        for link, reply in links:
            reply.close()
            link.close()

    assert failure_of(refused).code == "over_budget"
    assert left == {run.run_uid for run in runs}


def test_the_stricter_of_two_budgets_counts(agent: Agent) -> None:
    """A console's budget for the node comes with the run; the agent's own stands beside it."""
    with agent.client("") as client:
        warm(agent, client, "first")
        small = warm(agent, client, "second", budget="1 kB")
        large = warm(agent, client, "third", budget="99%")

    assert "(hold_budget 1 kB)" in failure_of(small).detail
    assert large.state is RunState.READY


def test_a_model_that_is_there_already_needs_no_budget(agent: Agent) -> None:
    """Starting from a resident or a standby takes nothing more."""
    with agent.client("") as client:
        warm(agent, client, "first")
        again = warm(agent, client, "first", budget="1")
        warm(agent, client, "second", "standby")
        reused = warm(agent, client, "second", "standby", budget="1")

    assert (again.state, again.tier_from) == (RunState.READY, Tier.RESIDENT)
    assert (reused.state, reused.tier_from) == (RunState.READY, Tier.STANDBY)


@pytest.mark.parametrize(
    ("limit", "needed_bytes", "held_bytes", "told"),
    [
        (
            "10 MB",
            8_376_832,
            8_380_544,
            "needs 8.38 MB; of the 10.00 MB that may be held there (hold_budget 10 MB) 8.38",
        ),
        ("60 GB", 9_000_000, 59_995_000_000, "needs 0.01 GB; of the 60.00 GB that may be held there"),
    ],
)
def test_numbers_that_are_compared_have_one_unit(limit: str, needed_bytes: int, held_bytes: int, told: str) -> None:
    """That of the largest of them."""
    held = Resident("run-1", "tiny", "/m", "cpu", Tier.RESIDENT, held_bytes, None, "ada", 0)
    with pytest.raises(StageError) as refused:
        check_budgets("cpu", needed_bytes, None, [held], [parse_budget(limit)])

    assert f"cpu: {told}" in refused.value.failure.detail


def test_a_model_larger_than_the_budget_is_told_to_raise_it() -> None:
    """There is nothing to release."""
    with pytest.raises(StageError) as refused:
        check_budgets("cpu", 2, None, [], [parse_budget("1")])

    assert refused.value.failure.detail.endswith("(hold_budget 1) 0 bytes are taken; raise hold_budget")
