"""Hand-written states of nodes, as an H200 fleet shows them, at one frozen moment."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

from console.state import LinkState, LinkStatus, LogLine, NodeState, RunView, StageBaseline
from remote_agent.protocol.messages import (
    Actor,
    Failure,
    Gpu,
    GpuSample,
    HelloResult,
    HostSample,
    ModelSource,
    Probe,
    Progress,
    Recipe,
    Resident,
    RunState,
    StageRecord,
    StageStatus,
    Tier,
)
from remote_agent.recipe import recipe_hash

MS = 1_000_000
S = 1_000 * MS
GB = 10**9
NOW_MONO_NS = 500_000 * S
NOW_WALL_NS = int(datetime(2025, 11, 29, 9, 14, 5, tzinfo=UTC).timestamp()) * S
OFFSET_NS = 7_000 * S
"""Console clock minus host clock."""

LLAMA = Recipe("llama-7b", ModelSource("/models/llama-2-7b"))
MINILM = Recipe("minilm", ModelSource("/models/all-minilm-l6-v2"))
RECIPES = {recipe.name: recipe for recipe in (LLAMA, MINILM)}
HASH = recipe_hash(LLAMA)
ACTOR = Actor("anna", "laptop")
WEIGHTS_BYTES = 13_476_839_424
H200_BYTES = 150_754_820_096
UUID = "GPU-5a6f1c1e-0000-4000-8000-{:012d}"

TIMES_MS = {
    "queue": (0, 1),
    "probe": (1, 40),
    "preflight": (41, 12),
    "init": (42, 20),
    "context": (64, 270),
    "weights": (336, 290),
    "assign": (628, 70),
    "compile": (700, 15),
    "first_request": (716, 350),
    "hold": (1068, 4),
}
BASELINE = StageBaseline(
    count=20,
    wall_ns=1_130 * MS,
    stages_ns={name: length * MS for name, (_, length) in TIMES_MS.items()},
    recent_wall_ns=tuple(value * MS for value in (1130, 1120, 1180, 1110, 1140, 1630, 1120, 1130, 1125, 1080)),
)


def stages(upto: str = "hold", *, running: bool = False, failed: bool = False) -> tuple[StageRecord, ...]:
    """Return the stages up to that one; the last may still be running, or have failed."""
    records = []
    for name, (start, length) in TIMES_MS.items():
        last = name == upto
        status = StageStatus.DONE
        if last and running:
            status = StageStatus.RUNNING
        elif last and failed:
            status = StageStatus.FAILED
        record = StageRecord(
            name,
            status,
            start_ns=start * MS,
            duration_ns=None if status is StageStatus.RUNNING else length * MS,
            attributed_ns=None if running else length * MS,
        )
        if name == "weights" and not (last and running):
            record = replace(
                record,
                bytes=WEIGHTS_BYTES,
                rate_bytes_s=46.4 * GB,
                ceiling_bytes_s=55.3 * GB,
                path="staged",
                extra={"read_ns": 260 * MS, "copy_ns": 240 * MS, "tensors": 291, "shards": 3},
            )
        if name == "preflight":
            record = replace(record, reason="291 tensors, 3 shards", bytes=WEIGHTS_BYTES, extra={"tier_from": "cached"})
        records.append(record)
        if last:
            break
    return tuple(records)


def gpu(index: int = 0, name: str = "NVIDIA H200", used: int = 14_600_000_000, busy: int = 2) -> Gpu:
    return Gpu(
        uuid=UUID.format(index),
        index=index,
        name=name,
        memory_total_bytes=H200_BYTES,
        memory_used_bytes=used,
        utilisation=busy,
        temperature_c=31 + index,
    )


def probe(*gpus: Gpu, sampler: str = "nvml") -> Probe:
    return Probe(
        hostname="host",
        kernel="6.8.0",
        cpu_count=64,
        memory_total_bytes=512 * GB,
        memory_available_bytes=400 * GB,
        sampler=sampler,  # type: ignore[arg-type]
        gpus=gpus,
    )


def host(*gpus: Gpu) -> HostSample:
    samples = tuple(
        GpuSample(one.uuid, one.memory_used_bytes, one.memory_total_bytes, one.utilisation, one.temperature_c)
        for one in gpus
    )
    return HostSample(512 * GB, 400 * GB, 1.4, samples)


def hello() -> HelloResult:
    return HelloResult(
        1, "0.1.0", "journal-1", "boot-1", 1, 40, "host", "anna", 77, "/usr/bin/python3", 5.0, 0, NOW_WALL_NS
    )


def linked(age_s: float = 10_800) -> LinkState:
    return LinkState(LinkStatus.CONNECTED, since_s=NOW_MONO_NS / S - age_s)


def resident(run_uid: str, recipe: str = "llama-7b") -> Resident:
    return Resident(
        run_uid, recipe, "/models/llama-2-7b", UUID.format(0), Tier.STANDBY, WEIGHTS_BYTES, 4242, "anna", NOW_WALL_NS
    )


def run(uid: str, state: RunState, elapsed_ms: int = 1_080, **changes: object) -> RunView:
    view = RunView(
        run_uid=uid,
        recipe="llama-7b",
        recipe_hash=HASH,
        model="/models/llama-2-7b",
        actor=ACTOR,
        state=state,
        tier_from=Tier.CACHED,
        accepted_mono_ns=NOW_MONO_NS - OFFSET_NS - elapsed_ms * MS,
        accepted_wall_ns=NOW_WALL_NS - elapsed_ms * MS,
        devices=(UUID.format(0),),
        baseline=BASELINE,
    )
    return replace(view, **changes)  # type: ignore[arg-type]


def node(name: str, view: RunView | None = None, **changes: object) -> NodeState:
    gpus = (gpu(),)
    log = ()
    if view is not None:
        log = (
            LogLine(NOW_WALL_NS - 1_080 * MS, view.run_uid, "info", "llama-7b accepted from anna@laptop"),
            LogLine(NOW_WALL_NS - 700 * MS, view.run_uid, "info", "context done 0.27 s"),
        )
    state = NodeState(
        name=name,
        tags=("eu", "prod"),
        recipes=("llama-7b",),
        link=linked(),
        hello=hello(),
        probe=probe(*gpus),
        host=host(*gpus),
        residents=(),
        runs={view.run_uid: view} if view else {},
        latest_run=view.run_uid if view else None,
        clock_offset_ns=OFFSET_NS,
        log=log,
    )
    return replace(state, **changes)  # type: ignore[arg-type]


def ready(name: str, uid: str = "7f3a12cd0001") -> NodeState:
    view = run(
        uid,
        RunState.READY,
        wall_ns=1_080 * MS,
        unattributed_ns=20 * MS,
        first_output_ns=360 * MS,
        output="The",
        stages=stages(),
        tier_to=Tier.STANDBY,
    )
    return node(name, view, residents=(resident(uid),))


def loading(name: str, uid: str = "7f3a12cd0002") -> NodeState:
    view = run(
        uid,
        RunState.RUNNING,
        elapsed_ms=534,
        stages=stages("weights", running=True),
        progress=Progress(uid, "weights", 9_100_000_000, WEIGHTS_BYTES, "bytes", 51.2 * GB, 55.3 * GB),
    )
    return node(name, view, host=host(gpu(used=6_100_000_000, busy=41)))


def compiling(name: str, uid: str = "7f3a12cd0003") -> NodeState:
    return node(name, run(uid, RunState.RUNNING, elapsed_ms=708, stages=stages("compile", running=True)))


def queued(name: str, uid: str = "7f3a12cd0004") -> NodeState:
    waiting = run(uid, RunState.QUEUED, is_accepted=False, accepted_mono_ns=None, waits_among="the parallel loads")
    return node(name, waiting)


def failed(name: str, uid: str = "7f3a12cd0005") -> NodeState:
    failure = Failure(
        "kernel_image",
        "no kernel image for sm_90: torch 2.1 is built for sm_80",
        "compile",
        ("RuntimeError: CUDA error: no kernel image is available for execution on the device",),
    )
    view = run(
        uid,
        RunState.FAILED,
        wall_ns=716 * MS,
        unattributed_ns=3 * MS,
        stages=stages("compile", failed=True),
        failure=failure,
    )
    return node(name, view)


def cold(name: str) -> NodeState:
    return node(name, host=host(gpu(used=500_000_000, busy=0)))


def silent(name: str, uid: str = "7f3a12cd0006") -> NodeState:
    view = run(uid, RunState.RUNNING, elapsed_ms=40_000, stages=stages("weights", running=True))
    link = LinkState(LinkStatus.SILENT, NOW_MONO_NS / S - 34, "no heartbeat for 34 s")
    return node(name, view, link=link)


def disconnected(name: str) -> NodeState:
    link = LinkState(
        LinkStatus.DISCONNECTED,
        NOW_MONO_NS / S - 95,
        "connection refused by 10.2.0.7 port 22",
        retry_at_s=NOW_MONO_NS / S + 12,
    )
    return replace(node(name), link=link, residents=(resident("7f3a12cd0099"),))


def refused(name: str) -> NodeState:
    """A node that was never reached and will not be without a person."""
    link = LinkState(
        LinkStatus.DISCONNECTED, NOW_MONO_NS / S - 3, "the host key of eu-08 port 22 is not known", None, final=True
    )
    return NodeState(name, ("eu",), ("llama-7b",), link)


def connecting(name: str) -> NodeState:
    return NodeState(name, ("eu",), ("llama-7b",), LinkState(LinkStatus.CONNECTING, NOW_MONO_NS / S - 2))


def eightfold(name: str) -> NodeState:
    gpus = tuple(gpu(index, used=52 * GB + index * GB, busy=90 if index < 3 else 0) for index in range(8))
    return replace(ready(name, "7f3a12cd0007"), probe=probe(*gpus), host=host(*gpus))


def cpu_only(name: str) -> NodeState:
    return replace(cold(name), probe=probe(sampler="absent"), host=HostSample(64 * GB, 51 * GB, 0.4), tags=("lab",))


def fleet() -> tuple[NodeState, ...]:
    """One node of every kind."""
    return (
        ready("gpu-eu-01"),
        loading("gpu-eu-02"),
        failed("gpu-eu-03"),
        compiling("gpu-eu-04"),
        cold("gpu-eu-05"),
        silent("gpu-eu-06"),
        disconnected("gpu-eu-07"),
        refused("gpu-eu-08"),
        connecting("gpu-eu-09"),
        eightfold("gpu-eu-10"),
        queued("gpu-eu-11"),
        cpu_only("lab-01"),
    )
