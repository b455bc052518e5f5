"""The reducer and what is read from its states."""

from __future__ import annotations

import copy
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from console.reduce import reduce
from console.state import (
    LOG_LINES,
    RUNS_KEPT,
    BaselineLoaded,
    Change,
    EventReceived,
    GapReceived,
    HelloReceived,
    LinkChanged,
    LinkState,
    LinkStatus,
    LocalFinding,
    NodeState,
    ProbeReceived,
    RunDropped,
    RunQueued,
    RunReceived,
    RunView,
    SampleReceived,
    StageBaseline,
    StatusReceived,
    elapsed_ns,
    eta_ns,
)
from remote_agent.protocol.messages import (
    NATIVE_STAGES,
    DaemonStarted,
    Event,
    Failure,
    Finding,
    Gap,
    HostSample,
    Probe,
    Progress,
    RunFinished,
    RunStarted,
    RunState,
    Sample,
    StageStatus,
    StatusResult,
    Tier,
    UnknownData,
)
from tests.console.happenings import (
    ACTOR,
    HASH,
    MS,
    RECORDS,
    RUN_UIDS,
    TEXT,
    TIMES,
    accepted,
    event,
    hello,
    journals,
    record,
    resident,
    stage,
)

UID = "run-00000001"
CONSOLE_NS = 50_000 * MS
PROBE = Probe("host", "6.1", 8, 100, 50, "absent")
CONNECTED = LinkChanged(LinkState(LinkStatus.CONNECTED, 1.0))


def after(*changes: Change | Event, state: NodeState | None = None) -> NodeState:
    state = state or NodeState("node")
    for change in changes:
        state = reduce(state, EventReceived(change, CONSOLE_NS) if isinstance(change, Event) else change)
    return state


def greeted(*changes: Change | Event) -> NodeState:
    return after(HelloReceived(hello(), CONSOLE_NS), CONNECTED, *changes)


def a_run(state: NodeState) -> RunView:
    assert state.run is not None
    return state.run


changes = st.one_of(
    st.builds(LinkChanged, st.builds(LinkState, st.sampled_from(list(LinkStatus)), st.floats(0, 1e9))),
    st.builds(HelloReceived, st.builds(lambda uuid, boot: hello(journal_uuid=uuid, boot_id=boot), TEXT, TEXT), TIMES),
    st.builds(lambda runs: StatusReceived(StatusResult(tuple(runs), (), {})), st.lists(RECORDS, max_size=3)),
    st.builds(RunReceived, RECORDS),
    st.builds(lambda uid: RunQueued(queued(uid)), RUN_UIDS),
    st.builds(RunDropped, RUN_UIDS, TIMES, st.none() | st.just(Failure("refused", "no"))),
    st.just(ProbeReceived(PROBE)),
    st.builds(GapReceived, st.builds(Gap, TIMES, TIMES)),
    st.builds(
        lambda uid, name, done: SampleReceived(Sample(done, done, Progress(uid, name, done, 2**62)), done),
        RUN_UIDS,
        st.sampled_from(NATIVE_STAGES),
        TIMES,
    ),
    st.builds(
        BaselineLoaded,
        st.tuples(st.just(HASH), st.sampled_from(list(Tier)), st.booleans()),
        st.just(StageBaseline(1, 5, {})),
    ),
    st.builds(LocalFinding, TIMES, st.builds(Finding, TEXT, st.just("info"), TEXT)),
    journals().map(lambda events: EventReceived(events[-1] if events else event(1, RunStarted()), 5)),
)


def queued(run_uid: str = UID) -> RunView:
    return RunView(
        run_uid,
        "llama",
        HASH,
        "/models/llama",
        ACTOR,
        RunState.QUEUED,
        Tier.COLD,
        None,
        hello().t_wall_ns,
        is_accepted=False,
    )


@given(journals(), st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30))))
def test_a_replay_of_any_part_changes_nothing(events: list[Event], replays: list[tuple[int, int]]) -> None:
    """At-least-once delivery in order, with whatever was already sent sent again, ends in the same state."""
    once = after(HelloReceived(hello(), CONSOLE_NS), *events)

    stream: list[Event] = []
    cuts = dict(replays)
    for place, one in enumerate(events):
        stream.append(one)
        if place in cuts:
            stream += events[max(0, place - cuts[place]) : place + 1]

    assert after(HelloReceived(hello(), CONSOLE_NS), *stream) == once


@given(st.lists(changes, max_size=25))
def test_nothing_that_happens_raises_or_touches_the_state_before(happened: list[Change]) -> None:
    """Any sequence of changes is reduced, inputs stay equal to their copies, and every bound holds."""
    state = NodeState("node")
    for change in happened:
        before, change_before = copy.deepcopy(state), copy.deepcopy(change)

        following = reduce(state, change)

        assert state == before
        assert change == change_before
        assert following.name == "node"
        assert len(following.log) <= LOG_LINES
        assert len([run for run in following.runs.values() if run.is_accepted]) <= RUNS_KEPT
        assert following.latest_run is None or following.latest_run in following.runs
        state = following


@given(st.lists(changes, max_size=25))
def test_a_run_that_is_over_never_changes_its_outcome(happened: list[Change]) -> None:
    """Whatever follows, a terminal run keeps its state, its parts and its failure while it is kept."""
    state = greeted(event(1, accepted()), event(2, RunFinished(record(state=RunState.FAILED))))
    over = replace(state.runs[UID], baseline=None)

    for change in happened:
        state = reduce(state, change)
        if UID in state.runs:
            assert replace(state.runs[UID], baseline=None) == over


@given(st.lists(changes, max_size=10), st.sampled_from(list(LinkStatus)))
def test_a_link_changes_no_run(happened: list[Change], status: LinkStatus) -> None:
    """Losing a node says nothing about what runs there."""
    state = after(*happened)

    lost = reduce(state, LinkChanged(LinkState(status, 3.0, "connection lost")))

    assert lost.runs == state.runs
    assert lost.residents == state.residents
    assert lost.is_known is (status is LinkStatus.CONNECTED)


def test_a_run_is_followed_from_acceptance_to_ready() -> None:
    """The view walks through its states, its stages lie in canonical order, and its parts are the host's."""
    state = greeted(event(1, accepted()))
    assert a_run(state).state is RunState.QUEUED

    state = after(event(2, RunStarted()), event(3, stage("weights", StageStatus.RUNNING, 5)), state=state)
    state = after(event(4, stage("probe", StageStatus.DONE, 0, 3)), state=state)
    assert a_run(state).state is RunState.RUNNING
    assert [one.name for one in a_run(state).stages] == ["probe", "weights"]
    assert a_run(state).current_stage == a_run(state).stages[1]

    state = after(event(5, RunFinished(record(wall_ns=1000))), state=state)
    run = a_run(state)
    assert run.state is RunState.READY
    assert sum(one.attributed_ns or 0 for one in run.stages) + (run.unattributed_ns or 0) == run.wall_ns == 1000
    assert state.log[-1].text.startswith("llama ready in")


def test_preflight_corrects_where_the_run_started_from_and_its_baseline() -> None:
    """What the page cache held is known only after preflight; the baseline follows."""
    cold, cached = StageBaseline(20, 8000, {"weights": 7000}), StageBaseline(20, 1000, {"weights": 300})
    state = greeted(
        BaselineLoaded((HASH, Tier.COLD, False), cold),
        BaselineLoaded((HASH, Tier.CACHED, False), cached),
        event(1, accepted()),
    )
    assert a_run(state).baseline == cold

    state = after(event(2, stage("preflight", StageStatus.DONE, 0, 5, tier_from="cached")), state=state)

    assert a_run(state).tier_from is Tier.CACHED
    assert a_run(state).baseline == cached


def test_an_armed_run_is_compared_with_armed_runs_alone() -> None:
    """What it took says nothing beside a start that loaded weights, even if that was expected of it under way."""
    full, armed = StageBaseline(2, 3560, {}), StageBaseline(3, 250, {})
    over = replace(record(wall_ns=240), tier_to=Tier.ARMED)
    begun = greeted(BaselineLoaded((HASH, Tier.COLD, False), full), event(1, accepted()))
    assert a_run(begun).baseline == full

    alone = after(event(2, RunFinished(over)), state=begun)
    assert a_run(alone).baseline is None
    told = after(BaselineLoaded((HASH, Tier.COLD, True), armed), event(2, RunFinished(over)), state=begun)
    assert a_run(told).baseline == armed
    standby = after(event(2, RunFinished(record(wall_ns=3500))), state=begun)
    assert a_run(standby).baseline == full


def test_a_stage_never_steps_back() -> None:
    """A stage that is over is not running again because a status was older than the event."""
    state = greeted(event(1, accepted()), event(2, stage("weights", StageStatus.DONE, 5, 9)))
    behind = replace(record(state=RunState.RUNNING, wall_ns=None), stages=())

    state = after(StatusReceived(StatusResult((behind,), (), {})), state=state)

    assert a_run(state).stages[0].status is StageStatus.DONE
    assert a_run(state).state is RunState.RUNNING


def test_a_console_that_comes_back_learns_of_the_run_from_status() -> None:
    """A run accepted before the cursor is known from status, with an elapsed time from the host's clock."""
    greeting = hello()
    running = replace(
        record(state=RunState.RUNNING, wall_ns=None), accepted_wall_ns=greeting.t_wall_ns - 300 * MS, stages=()
    )

    state = greeted(StatusReceived(StatusResult((running,), (resident().resident,), {}, PROBE)))

    assert elapsed_ns(a_run(state), state, CONSOLE_NS + 100 * MS) == 400 * MS
    assert state.probe == PROBE
    assert state.residents == (resident().resident,)


def test_the_clock_offset_is_the_smallest_seen_of_this_boot() -> None:
    """Delay only ever adds to the offset; another boot has another clock."""
    greeting = hello()
    host = HostSample(1, 1, 0.0)
    late, early = greeting.t_mono_ns + 5 * MS, greeting.t_mono_ns + 9 * MS

    state = greeted(SampleReceived(Sample(late, 1, host=host), CONSOLE_NS + 50 * MS))
    assert state.clock_offset_ns == CONSOLE_NS - greeting.t_mono_ns
    state = after(SampleReceived(Sample(early, 1, host=host), CONSOLE_NS + 2 * MS), state=state)
    assert state.clock_offset_ns == CONSOLE_NS - greeting.t_mono_ns - 7 * MS
    assert state.host == host

    state = after(HelloReceived(hello(boot_id="boot-2", t_mono_ns=MS), CONSOLE_NS), state=state)
    assert state.clock_offset_ns == CONSOLE_NS - MS


def test_an_event_from_an_earlier_boot_does_not_move_the_clock() -> None:
    """A replayed event's monotonic time may be of another boot."""
    old = replace(event(1, DaemonStarted("0.1.0", "boot-0", 3), None), t_mono_ns=10**18, t_wall_ns=1)

    state = greeted(old)

    assert state.clock_offset_ns == CONSOLE_NS - hello().t_mono_ns
    assert state.log[-1].text == "agent 0.1.0 started, pid 3"


def test_a_new_journal_starts_counting_anew() -> None:
    """Events of the new journal count from its own first seq, and the log says what was lost."""
    state = greeted(event(900, accepted()))

    state = after(HelloReceived(hello(journal_uuid="journal-2"), CONSOLE_NS), event(1, RunStarted()), state=state)

    assert state.seq == 1
    assert a_run(state).state is RunState.RUNNING
    assert any("new journal" in line.text for line in state.log)


def test_residents_come_and_go_only_once_the_node_was_asked() -> None:
    """An event alone does not pretend to know all residents."""
    state = greeted(event(1, resident()))
    assert state.residents is None

    state = after(StatusReceived(StatusResult((), (), {})), event(2, resident()), state=state)
    assert [one.run_uid for one in state.residents or ()] == [UID]

    state = after(event(3, resident(state="gone")), state=state)
    assert state.residents == ()


def test_what_this_version_does_not_know_becomes_a_log_line() -> None:
    """An event of a later agent is said, not guessed at."""
    state = greeted(event(1, UnknownData({"x": 1})))

    assert "from.the.future" in state.log[-1].text
    assert state.seq == 1


def test_an_event_that_can_t_be_read_becomes_a_warning() -> None:
    """The line has its number and what does not fit, and later events are applied."""
    state = greeted(event(1, UnknownData([], "run.stage: expected a table, got a list")), event(2, UnknownData(0)))

    assert (state.log[0].severity, state.seq) == ("warning", 2)
    assert "event 1 " in state.log[0].text
    assert "run.stage: expected a table, got a list" in state.log[0].text


def test_gaps_and_findings_are_said() -> None:
    """What was lost and what the console itself noticed stand in the log with their severity."""
    state = greeted(GapReceived(Gap(3, 9)), LocalFinding(5, Finding("clock", "warning", "clock jumped")))

    assert [line.severity for line in state.log] == ["warning", "warning"]
    assert "3 to 9" in state.log[0].text


def test_a_run_waits_here_until_its_node_accepts_or_refuses_it() -> None:
    """A queued run is visible before it is sent; acceptance replaces it and a refusal fails it."""
    waiting = greeted(RunQueued(queued()))
    assert a_run(waiting).is_accepted is False
    assert elapsed_ns(a_run(waiting), waiting, CONSOLE_NS) is None

    started = after(event(1, accepted()), state=waiting)
    assert a_run(started).is_accepted is True
    assert after(RunDropped(UID, 5), state=started).runs == started.runs

    refused = after(RunDropped(UID, 5, Failure("no_such_model", "/models/llama: no such file")), state=waiting)
    assert a_run(refused).state is RunState.FAILED
    assert "no such file" in refused.log[-1].text
    assert a_run(after(RunDropped(UID, 5), state=waiting)).state is RunState.CANCELLED


def test_the_panel_shows_what_runs_before_what_is_newest() -> None:
    """A run that waits or is over does not hide the one that runs."""
    state = greeted(
        event(1, accepted()),
        event(2, RunStarted()),
        event(3, accepted(), "run-00000002"),
    )
    assert state.latest_run == UID

    state = after(event(4, RunFinished(record())), state=state)
    assert state.latest_run == "run-00000002"


def test_progress_ends_with_its_stage() -> None:
    """A late sample does not bring back a stage that is over."""
    progress = SampleReceived(Sample(hello().t_mono_ns, 1, Progress(UID, "weights", 5, 10)), CONSOLE_NS)
    state = greeted(event(1, accepted()), event(2, stage("weights", StageStatus.RUNNING)), progress)
    assert a_run(state).progress == Progress(UID, "weights", 5, 10)

    state = after(event(3, stage("weights", StageStatus.DONE, 0, 5)), state=state)
    assert a_run(state).progress is None
    assert a_run(after(progress, state=state)).progress is None


def test_the_time_left_is_the_rate_for_bytes_and_history_for_the_rest() -> None:
    """Known bytes count by their rate, what has not begun by its median; without history nothing is claimed."""
    baseline = StageBaseline(5, 600 * MS, {"weights": 300 * MS, "compile": 200 * MS, "probe": 100 * MS})
    progress = Progress(UID, "weights", 750, 1000, rate_bytes_s=1000.0)
    state = greeted(
        event(1, accepted()),
        event(2, stage("probe", StageStatus.DONE, 0, 1)),
        event(3, stage("weights", StageStatus.RUNNING, 10 * MS)),
        SampleReceived(Sample(hello().t_mono_ns, 1, progress), CONSOLE_NS),
    )
    assert eta_ns(a_run(state), state, CONSOLE_NS) is None

    state = after(BaselineLoaded((HASH, Tier.COLD, False), baseline), state=state)

    assert eta_ns(a_run(state), state, CONSOLE_NS) == 450 * MS
    over = after(event(4, RunFinished(record())), state=state)
    assert eta_ns(a_run(over), over, CONSOLE_NS) is None
    assert elapsed_ns(a_run(over), over, CONSOLE_NS) == 100
