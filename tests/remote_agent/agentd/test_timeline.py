"""A run's stages from several workers as one record each, with parts that sum to the whole."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from remote_agent.agentd.ledger import Ledger, OpenRun, interrupted
from remote_agent.agentd.stages import WORKER_STAGES
from remote_agent.agentd.timeline import Figures, Timeline
from remote_agent.protocol.codec import decode, encode
from remote_agent.protocol.messages import (
    NATIVE_STAGES,
    Actor,
    Event,
    ModelSource,
    Recipe,
    RunAccepted,
    RunRecord,
    RunStarted,
    RunState,
    StageChanged,
    StageRecord,
    StageStatus,
    Tier,
)

DEVICES = ("GPU-a", "GPU-b")


def two_devices() -> Timeline:
    timeline = Timeline(1000)
    timeline.divide(WORKER_STAGES, DEVICES)
    return timeline


def test_a_stage_of_two_devices_is_their_union() -> None:
    """Earliest start, latest end, bytes and ceilings summed, the rate that of the union."""
    timeline = two_devices()
    timeline.begin("weights", "GPU-a", 1100)
    timeline.begin("weights", "GPU-b", 1200)
    timeline.end(
        "weights", "GPU-a", StageStatus.DONE, 1300, Figures(100, 1.0, 5.0, "mapped", None, {"n": 1, "same": 2})
    )
    half = timeline.record("weights")
    timeline.end(
        "weights", "GPU-b", StageStatus.DONE, 1600, Figures(300, 1.0, 5.0, "staged", None, {"n": 3, "same": 2})
    )
    whole = timeline.record("weights")

    assert (half.status, half.duration_ns) == (StageStatus.RUNNING, None)
    assert (whole.status, whole.start_ns, whole.duration_ns, whole.bytes) == (StageStatus.DONE, 100, 500, 400)
    assert (whole.rate_bytes_s, whole.ceiling_bytes_s, whole.path) == (400 / 500e-9, 10.0, "mapped; staged")
    assert whole.extra == {"GPU-a.n": 1, "GPU-b.n": 3, "same": 2}


def test_one_device_keeps_its_own_rate_and_figures() -> None:
    """What a single worker says of itself is not recomputed."""
    timeline = Timeline(0)
    timeline.divide(WORKER_STAGES, ("cpu",))
    timeline.begin("weights", "cpu", 10)
    timeline.end("weights", "cpu", StageStatus.DONE, 20, Figures(7, 3.5, 9.0, "mapped", "why", {"n": 1}))

    record = timeline.record("weights")
    assert (record.rate_bytes_s, record.reason, record.extra) == (3.5, "why", {"n": 1})


def test_time_between_two_devices_parts_is_not_claimed() -> None:
    """Attribution follows the parts, not their union: a hole between them is nobody's."""
    timeline = two_devices()
    for device, start, end in (("GPU-a", 1000, 1100), ("GPU-b", 1500, 1600)):
        timeline.begin("assign", device, start)
        timeline.end("assign", device, StageStatus.DONE, end, Figures())
    stages, unattributed_ns = timeline.settle(600)

    assert next(stage.attributed_ns for stage in stages if stage.name == "assign") == 200
    assert unattributed_ns == 400


def test_a_failure_of_one_device_is_the_stages() -> None:
    """As soon as one part has failed the stage has."""
    timeline = two_devices()
    for device in DEVICES:
        timeline.begin("compile", device, 1000)
    timeline.end("compile", "GPU-b", StageStatus.FAILED, 1100, Figures(reason="no"))

    assert timeline.record("compile").status is StageStatus.FAILED


def test_closing_fails_what_runs_and_skips_what_was_not_reached() -> None:
    """After the end no stage is pending or running, and the times of what ran are kept."""
    timeline = Timeline(0)
    timeline.begin("queue", "", 0)
    timeline.end("queue", "", StageStatus.DONE, 5, Figures())
    timeline.begin("probe", "", 5)
    timeline.close(9, "cancelled", None)
    records = {record.name: record for record in timeline.records()}

    assert (records["probe"].status, records["probe"].duration_ns) == (StageStatus.FAILED, 4)
    assert records["probe"].reason == "cancelled"
    assert {records[name].status for name in NATIVE_STAGES[2:]} == {StageStatus.SKIPPED}
    assert records["hold"].start_ns is None


spans = st.tuples(st.sampled_from(NATIVE_STAGES), st.integers(-50, 500), st.integers(0, 500))


@given(st.lists(spans, max_size=10, unique_by=lambda span: span[0]), st.integers(0, 600))
def test_parts_always_sum_to_the_wall_time(chosen: list[tuple[str, int, int]], wall_ns: int) -> None:
    """Whatever ran when, also outside the run, the parts are exactly the whole and none is negative."""
    timeline = Timeline(0)
    for stage, start, length in chosen:
        timeline.begin(stage, "", start)
        timeline.end(stage, "", StageStatus.DONE, start + length, Figures())
    timeline.close(wall_ns, "over", None)
    stages, unattributed_ns = timeline.settle(wall_ns)
    shares = [stage.attributed_ns for stage in stages]

    assert all(share is not None and share >= 0 for share in shares)
    assert sum(share or 0 for share in shares) + unattributed_ns == wall_ns
    assert unattributed_ns >= 0


# --- the ledger ---


def accepted(seq: int, uid: str = "run-one-1") -> Event:
    recipe = Recipe("tiny", ModelSource("/m"))
    return Event(seq, uid, 100, 5, "run.accepted", RunAccepted(recipe, "hash", Actor("a", "b"), Tier.COLD, ("cpu",)))


def changed(seq: int, stage: StageRecord, t_mono_ns: int) -> Event:
    return Event(seq, "run-one-1", t_mono_ns, 6, "run.stage", StageChanged(stage))


def open_run() -> OpenRun:
    """Return a run whose agent died 40 ns into weights, 300 ns after acceptance."""
    ledger = Ledger()
    ledger.apply(accepted(1))
    ledger.apply(Event(2, "run-one-1", 150, 6, "run.started", RunStarted()))
    ledger.apply(changed(3, StageRecord("preflight", StageStatus.DONE, 50, 100, extra={"tier_from": "cached"}), 250))
    ledger.apply(changed(4, StageRecord("weights", StageStatus.RUNNING, 260), 400))
    return ledger.runs["run-one-1"]


def test_an_interrupted_run_claims_only_what_its_events_say() -> None:
    """Its wall time ends with its last event; what ran then has failed, and the parts sum."""
    record = interrupted(open_run(), "the agent died")
    stages = {stage.name: stage for stage in record.stages}

    assert record.state is RunState.INTERRUPTED
    assert (record.wall_ns, record.tier_from) == (300, Tier.CACHED)
    assert (stages["weights"].status, stages["weights"].duration_ns) == (StageStatus.FAILED, 40)
    assert stages["compile"].status is StageStatus.SKIPPED
    assert sum(stage.attributed_ns or 0 for stage in record.stages) + (record.unattributed_ns or 0) == 300
    assert record.failure is not None
    assert record.failure.stage == "weights"


def test_an_open_run_survives_its_checkpoint() -> None:
    """A checkpoint written and read again knows the same open run."""
    before = open_run()

    assert decode(OpenRun, encode(before)) == before
    assert isinstance(before.record, RunRecord)
