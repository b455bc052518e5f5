"""Whatever happens to a rollout, in whatever order: the rules that `World` checks hold, and it can end."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from console.rollout import events as e
from console.rollout.states import GateRule, NodeState, Phase, Rules, Verdict
from tests.console.rollout.world import HOOKS, World

NAMES = ("a", "b", "c", "d", "e")
BATCHES = ((("a",), ("b", "c"), ("d", "e")), (("a", "b", "c", "d", "e"),), (("a", "b"), ("c", "d", "e")))

names = st.sampled_from(NAMES)
counts = st.integers(1, 3)
gates = st.builds(
    GateRule,
    count=st.just(3),
    interval_s=st.just(5.0),
    failure_limit=st.integers(0, 1),
    consecutive_success=st.sampled_from([None, 2]),
    batches=st.sampled_from([(), (1,), (2,)]),
)
rule_sets = st.builds(
    Rules,
    max_unavailable=counts,
    max_failures=st.integers(1, 5),
    progress_deadline_s=st.just(500.0),
    node_timeout_s=st.just(100.0),
    retries=st.integers(0, 2),
    backoff_s=st.just(5.0),
    pause_after=st.sampled_from([(), (1,), (1, 2)]),
    gates=st.lists(gates, max_size=2).map(tuple),
    hooks=st.sampled_from([(), HOOKS, ("shift", "on_abort"), ("before_shift", "on_abort")]),
)
deeds = st.one_of(
    st.tuples(st.just("reach"), names, st.sampled_from(list(NodeState)), st.booleans()),
    st.tuples(st.just("warm"), names),
    st.tuples(st.just("hook"), names, st.booleans()),
    st.tuples(st.just("back"), names, st.booleans()),
    st.tuples(st.just("end"), names, st.booleans()),
    st.tuples(st.just("sample"), st.integers(0, 1), st.sampled_from(list(Verdict))),
    st.tuples(st.just("tick"), st.sampled_from([1.0, 5.0, 60.0, 400.0])),
    st.tuples(st.just("down"), names, st.booleans()),
    st.tuples(st.just("skip"), names, st.sampled_from(["", "  ", "bad disk"])),
    st.tuples(st.just("retry"), names),
    st.tuples(st.just("old"), names, st.sampled_from(list(NodeState))),
    st.sampled_from(
        [("cooperate",), ("restart",), ("pause",), ("resume",), ("promote",), ("promote all",), ("abort",)]
    ),
)
fewer_ends = st.one_of(deeds.filter(lambda deed: deed[0] != "abort"), st.just(("cooperate",)), st.just(("resume",)))


def event_of(world: World, deed: tuple[object, ...]) -> e.Event:
    """Return the event that a deed is now; what it is about need not be there."""
    kind, *rest = deed
    analysis = world.state.analysis.number if world.state.analysis is not None else 1
    row = world.state.node(str(rest[0])) if rest else None
    name, attempt = (row.name, row.attempt) if row is not None else ("", 0)
    made: dict[object, object] = {
        "reach": lambda: e.NodeReached(name, attempt, rest[1], "so it is", rest[2]),  # type: ignore[arg-type]
        "warm": lambda: e.NodeReached(name, attempt, NodeState.VERIFYING),
        "hook": lambda: e.HookEnded(name, attempt, (row and row.hook) or "shift", bool(rest[1])),
        "back": lambda: e.BackedOut(name, bool(rest[1])),
        "end": lambda: e.StopEnded(name, row.endings[0].attempt if row and row.endings else attempt, bool(rest[1])),
        "sample": lambda: e.GateSampled(analysis, rest[0], rest[1]),  # type: ignore[arg-type]
        "tick": lambda: e.Tick(world.state.now_s + rest[0]),  # type: ignore[operator]
        "down": lambda: e.AvailabilityChanged(name, bool(rest[1])),
        "skip": lambda: e.Skip(name, str(rest[1])),
        "retry": lambda: e.Retry(name),
        "old": lambda: e.NodeReached(name, attempt - 1, rest[1]),  # type: ignore[arg-type]
        "restart": lambda: e.Restarted(3.0),
        "pause": lambda: e.Pause(),
        "resume": lambda: e.Resume(),
        "promote": lambda: e.Promote(),
        "promote all": lambda: e.Promote(everything=True),
        "abort": lambda: e.Abort(),
    }
    return made[kind]()  # type: ignore[no-any-return, operator]


def play(world: World, happenings: list[tuple[object, ...]]) -> None:
    for deed in happenings:
        if deed == ("cooperate",):
            world.cooperate()
        else:
            world.do(event_of(world, deed))


def brought_to_its_end(world: World) -> Phase:
    for _ in range(200):
        if world.state.phase.is_over:
            break
        world.cooperate()
        for name in NAMES:
            world.do(e.AvailabilityChanged(name, False))
    return world.state.phase


@settings(derandomize=True, max_examples=100, deadline=None)
@given(
    rules=rule_sets, batches=st.sampled_from(BATCHES), happenings=st.lists(fewer_ends, max_size=50), ends=st.booleans()
)
def test_every_list_of_events_keeps_the_rules_and_can_be_brought_to_its_end(
    rules: Rules, batches: tuple[tuple[str, ...], ...], happenings: list[tuple[object, ...]], ends: bool
) -> None:
    """At most max_unavailable at once, none shifted unverified or forgotten, failures once, each wait named."""
    world = World(rules, batches, ends=ends)
    play(world, happenings)

    assert brought_to_its_end(world).is_over


@settings(derandomize=True, max_examples=50, deadline=None)
@given(
    rules=rule_sets,
    batches=st.sampled_from(BATCHES),
    happenings=st.lists(fewer_ends, max_size=30),
    later=st.lists(deeds, max_size=20),
    ends=st.booleans(),
)
def test_after_an_abort_nothing_is_started_whatever_comes(
    rules: Rules,
    batches: tuple[tuple[str, ...], ...],
    happenings: list[tuple[object, ...]],
    later: list[tuple[object, ...]],
    ends: bool,
) -> None:
    """Nothing new is begun, what was ready stays so, and what was out of traffic has been brought back at the end."""
    world = World(rules, batches, ends=ends)
    play(world, happenings)
    world.do(e.Abort())
    ready = {row.name for row in world.state.nodes if row.state is NodeState.READY}
    so_far = len(world.asked)
    play(world, later)

    assert brought_to_its_end(world) in (Phase.ABORTED, Phase.DONE)
    begun = (e.StartNode, e.RunHook, e.TakeSample)
    assert not [intent for intent in world.asked[so_far:] if isinstance(intent, begun)]
    assert all(world.row(name).state is NodeState.READY for name in ready)
    assert not any(isinstance(one, e.BackOutNode) and one.node in ready for one in world.asked[so_far:])
    assert not any(row.is_out for row in world.state.nodes)


@settings(derandomize=True, max_examples=50, deadline=None)
@given(
    rules=rule_sets, batches=st.sampled_from(BATCHES), happenings=st.lists(fewer_ends, max_size=30), ends=st.booleans()
)
def test_after_a_restart_every_node_under_way_is_asked_for_and_nothing_goes_on_by_itself(
    rules: Rules, batches: tuple[tuple[str, ...], ...], happenings: list[tuple[object, ...]], ends: bool
) -> None:
    """Under way becomes unknown, a running rollout paused; resuming before all were read leaves it paused."""
    world = World(rules, batches, ends=ends)
    play(world, happenings)
    before = world.state
    wanted = world.do(e.Restarted(0.0))
    if before.phase.is_over:
        assert wanted == ()
        return

    under_way = [row.name for row in before.nodes if row.state.is_under_way or row.state is NodeState.UNKNOWN]
    assert [one.node for one in wanted if isinstance(one, e.ReadNode)] == under_way
    assert [row.name for row in world.state.nodes if row.state is NodeState.UNKNOWN] == under_way
    assert world.state.phase is (Phase.ABORTING if before.phase is Phase.ABORTING else Phase.PAUSED)
    assert not any(isinstance(one, e.StartNode | e.RunHook | e.TakeSample) for one in wanted)
    if under_way:
        world.do(e.Resume(), e.Promote(everything=True))
        assert world.state.phase is not Phase.RUNNING
    assert {row.name for row in before.nodes if row.is_out} == {row.name for row in world.state.nodes if row.is_out}
