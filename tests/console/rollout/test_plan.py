"""A plan says what the machine then does."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from console.rollout import events as e
from console.rollout.plan import Candidate, make_plan
from console.rollout.settings import Gate, Rollout
from console.rollout.states import Phase
from remote_agent.protocol.messages import Tier
from tests.console.rollout.world import World

sizes = st.one_of(st.integers(1, 5), st.sampled_from(["10%", "34%", "50%", "100%"]))
rollouts = st.builds(
    Rollout,
    name=st.just("r"),
    selector=st.just("all"),
    recipe=st.just("llama"),
    serial=st.lists(sizes, min_size=1, max_size=3).map(tuple),
    canary=st.none() | sizes,
    order=st.sampled_from(["as_listed", "coldest_first", "tag:x", ("tag:y", "tag:x")]),
    max_unavailable=sizes,
    pause_after=st.sampled_from([(), (1,), (1, 2)]),
    gates=st.sampled_from([(), (Gate(tier="standby", count=2, interval_s=5.0, batches=(1,)),)]),
)
candidates = st.lists(
    st.tuples(st.sampled_from([(), ("x",), ("y",), ("x", "y")]), st.sampled_from(list(Tier))), min_size=1, max_size=7
).map(lambda found: [Candidate(f"n{number}", tags, tier) for number, (tags, tier) in enumerate(found)])


@settings(derandomize=True, max_examples=60, deadline=None)
@given(rollout=rollouts, nodes=candidates)
def test_nodes_are_started_in_the_order_of_the_plan_and_it_pauses_where_the_plan_does(
    rollout: Rollout, nodes: list[Candidate]
) -> None:
    """Where nothing fails, to the last node."""
    plan = make_plan(rollout, nodes, 4)
    names = [[node.name for node in batch.nodes] for batch in plan.batches]
    world = World(plan.rules, names)
    for _ in range(100):
        world.cooperate()

    assert world.state.phase is Phase.DONE
    assert [one.node for one in world.asked if isinstance(one, e.StartNode)] == [node.name for node in plan.nodes]
    assert [one.reason for one in world.asked if isinstance(one, e.Paused)] == [
        f"after batch {batch.number}" for batch in plan.batches if batch.pauses_after
    ]


def test_a_batch_takes_as_long_as_its_waves_do() -> None:
    """Two waves of two and one, one run at a time, each with the 8 s between the samples of its slowest gate."""
    gates = (Gate(tier="standby", count=5, interval_s=2.0), Gate(tier="host"))
    nodes = [Candidate(f"n{number}", wall_ns=3_000_000_000, runs=1) for number in range(3)]
    rollout = Rollout("r", "all", "llama", max_unavailable=2, gates=gates)

    assert make_plan(rollout, nodes, parallel=1).expected_ns == (6 + 8 + 3 + 8) * 1_000_000_000
    assert make_plan(rollout, nodes, parallel=2).expected_ns == (3 + 8 + 3 + 8) * 1_000_000_000


def test_nodes_of_one_storage_are_expected_to_warm_one_after_the_other() -> None:
    """Two of three share it: the wave takes as long as these two."""
    nodes = [
        Candidate(f"n{number}", wall_ns=3_000_000_000, runs=1, storage_group=group)
        for number, group in enumerate(("nas-1", "nas-1", ""))
    ]
    plan = make_plan(Rollout("r", "all", "llama", max_unavailable=3), nodes, 8, {"nas-1": 1, "nas-2": 1})

    assert (plan.expected_ns, plan.storage_groups) == (6_000_000_000, {"nas-1": 1})
