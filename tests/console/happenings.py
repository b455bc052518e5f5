"""Builders of what a host may say, for the tests of everything that listens."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from remote_agent.protocol.messages import (
    NATIVE_STAGES,
    Actor,
    DaemonStarted,
    Event,
    Failure,
    Finding,
    HelloResult,
    ModelSource,
    Recipe,
    Resident,
    ResidentChanged,
    RunAccepted,
    RunFinished,
    RunRecord,
    RunStarted,
    RunState,
    StageChanged,
    StageRecord,
    StageStatus,
    Tier,
    UnknownData,
)

ACTOR = Actor("ada", "workstation")
RECIPE = Recipe("llama", ModelSource("/models/llama"))
HASH = "00112233445566aa"
MS = 1_000_000


def hello(**changes: object) -> HelloResult:
    """A host whose clock started ten seconds ago."""
    greeting = HelloResult(
        protocol=1,
        agent_version="0.1.0",
        journal_uuid="journal-1",
        boot_id="boot-1",
        oldest_seq=1,
        newest_seq=0,
        hostname="host",
        user="ada",
        pid=7,
        python="/usr/bin/python3",
        heartbeat_s=5.0,
        t_mono_ns=10_000 * MS,
        t_wall_ns=1_700_000_000_000 * MS,
    )
    return replace(greeting, **changes)  # type: ignore[arg-type]


def event(seq: int, data: object, run_uid: str | None = "run-00000001", kind: str | None = None) -> Event:
    """An event one millisecond after the one before it."""
    kinds = {
        DaemonStarted: "daemon.started",
        RunAccepted: "run.accepted",
        RunStarted: "run.started",
        StageChanged: "run.stage",
        RunFinished: "run.finished",
        ResidentChanged: "resident",
        Finding: "finding",
        UnknownData: "from.the.future",
    }
    greeting = hello()
    return Event(
        seq,
        run_uid,
        greeting.t_mono_ns + seq * MS,
        greeting.t_wall_ns + seq * MS,
        kind or kinds[type(data)],
        data,
    )


def accepted(tier: Tier = Tier.COLD) -> RunAccepted:
    return RunAccepted(RECIPE, HASH, ACTOR, tier, ("cpu",))


def stage(name: str, status: StageStatus, start_ns: int = 0, duration_ns: int | None = None, **extra: object) -> object:
    return StageChanged(StageRecord(name, status, start_ns, duration_ns, extra=extra))  # type: ignore[arg-type]


def record(run_uid: str = "run-00000001", state: RunState = RunState.READY, wall_ns: int | None = 100) -> RunRecord:
    """A run whose parts sum to ``wall_ns``: 60 % weights, 30 % compile, the rest unattributed."""
    wall = wall_ns or 0
    parts = {"weights": wall * 6 // 10, "compile": wall * 3 // 10}
    stages = tuple(
        StageRecord(name, StageStatus.DONE, 0, parts[name], parts[name])
        if name in parts
        else StageRecord(name, StageStatus.SKIPPED)
        for name in NATIVE_STAGES
    )
    over = state.is_terminal
    return RunRecord(
        run_uid=run_uid,
        recipe=RECIPE.name,
        recipe_hash=HASH,
        model=RECIPE.model.path,
        actor=ACTOR,
        state=state,
        tier_from=Tier.COLD,
        tier_to=Tier.STANDBY if state is RunState.READY else None,
        accepted_wall_ns=hello().t_wall_ns,
        devices=("cpu",),
        wall_ns=wall_ns if over else None,
        unattributed_ns=wall - sum(parts.values()) if over else None,
        first_output_ns=wall if state is RunState.READY else None,
        output="7" if state is RunState.READY else None,
        stages=stages if over else (),
        failure=Failure("worker_died", "killed by signal 9", "weights") if state is RunState.FAILED else None,
    )


def resident(run_uid: str = "run-00000001", state: str = "held") -> ResidentChanged:
    warm = Resident(run_uid, RECIPE.name, RECIPE.model.path, "cpu", Tier.STANDBY, 1000, 77, "ada", 1)
    return ResidentChanged(warm, state)  # type: ignore[arg-type]


RUN_UIDS = st.sampled_from([f"run-{number:08}" for number in range(30)])
TEXT = st.text(max_size=20)
TIMES = st.integers(0, 2**62)


@st.composite
def _stages(draw: st.DrawFn) -> StageRecord:
    return StageRecord(
        name=draw(st.sampled_from([*NATIVE_STAGES, "launch", "from_the_future"])),
        status=draw(st.sampled_from(list(StageStatus))),
        start_ns=draw(st.none() | TIMES),
        duration_ns=draw(st.none() | TIMES),
        attributed_ns=draw(st.none() | TIMES),
        bytes=draw(st.none() | TIMES),
        rate_bytes_s=draw(st.none() | st.floats(0, 1e15)),
        reason=draw(st.none() | TEXT),
        extra=draw(st.dictionaries(st.sampled_from(["tier_from", "x"]), st.sampled_from(["cached", "nonsense", 3]))),
    )


@st.composite
def _records(draw: st.DrawFn) -> RunRecord:
    base = record(draw(RUN_UIDS), draw(st.sampled_from(list(RunState))), draw(st.none() | TIMES))
    return replace(base, accepted_wall_ns=draw(TIMES), stages=tuple(draw(st.lists(_stages(), max_size=4))))


DATA = st.one_of(
    st.builds(DaemonStarted, TEXT, TEXT, st.integers(1, 99999)),
    st.builds(accepted, st.sampled_from(list(Tier))),
    st.just(RunStarted()),
    st.builds(StageChanged, _stages()),
    st.builds(RunFinished, _records()),
    st.builds(resident, RUN_UIDS, st.sampled_from(["held", "gone"])),
    st.builds(Finding, TEXT, st.sampled_from(["info", "warning", "error"]), TEXT),
    st.builds(UnknownData, st.none() | TEXT | st.integers()),
)
RECORDS = _records()


@st.composite
def journals(draw: st.DrawFn) -> list[Event]:
    """A journal: events in order, their ``seq`` rising with gaps."""
    events, seq = [], 0
    for data in draw(st.lists(DATA, max_size=30)):
        seq += draw(st.integers(1, 3))
        run_uid = data.run.run_uid if isinstance(data, RunFinished) else draw(st.none() | RUN_UIDS)
        events.append(event(seq, data, run_uid))
    return events
