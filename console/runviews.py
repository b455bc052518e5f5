"""How a run's view follows what its host says. Pure; a view that is over never changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeGuard

from console.state import BaselineKey, RunView, StageBaseline
from remote_agent.protocol.messages import (
    STAGES,
    Event,
    HelloResult,
    Progress,
    RunAccepted,
    RunRecord,
    RunState,
    StageRecord,
    StageStatus,
    Tier,
)

_ORDER = {name: place for place, name in enumerate(STAGES)}
_RANK = {StageStatus.PENDING: 0, StageStatus.RUNNING: 1}
STAGES_KEPT = 64


def advance(run: RunView | None, run_uid: str, data: RunAccepted, event: Event) -> RunView:
    """Return the view of a run that its host has accepted; what is known beyond that stays."""
    if _is_final(run):
        return run
    fresh = RunView(
        run_uid=run_uid,
        recipe=data.recipe.name,
        recipe_hash=data.recipe_hash,
        model=data.recipe.model.path,
        actor=data.actor,
        state=RunState.QUEUED,
        tier_from=data.tier_from,
        accepted_mono_ns=event.t_mono_ns,
        accepted_wall_ns=event.t_wall_ns,
        devices=data.devices,
    )
    if run is None or not run.is_accepted:
        return fresh
    return replace(run, accepted_mono_ns=event.t_mono_ns, accepted_wall_ns=event.t_wall_ns, devices=data.devices)


def from_record(run: RunView | None, record: RunRecord, hello: HelloResult | None) -> RunView:
    """Return the view that ``record`` gives, never a step back from ``run``."""
    if _is_final(run):
        return run
    known = run is not None and run.is_accepted
    accepted_mono_ns = run.accepted_mono_ns if run is not None and known else None
    if accepted_mono_ns is None and hello is not None:
        accepted_mono_ns = hello.t_mono_ns - (hello.t_wall_ns - record.accepted_wall_ns)
    view = RunView(
        run_uid=record.run_uid,
        recipe=record.recipe,
        recipe_hash=record.recipe_hash,
        model=record.model,
        actor=record.actor,
        state=record.state,
        tier_from=record.tier_from,
        accepted_mono_ns=accepted_mono_ns,
        accepted_wall_ns=record.accepted_wall_ns,
        devices=record.devices,
        tier_to=record.tier_to,
        stages=_in_order(record.stages),
        wall_ns=record.wall_ns,
        unattributed_ns=record.unattributed_ns,
        first_output_ns=record.first_output_ns,
        output=record.output,
        failure=record.failure,
        baseline=run.baseline if run is not None and run.is_armed is (record.tier_to is Tier.ARMED) else None,
    )
    if run is None or not run.is_accepted or record.state.is_terminal:
        return view
    return _merged(run, view)


def finish(run: RunView | None, record: RunRecord, event: Event) -> RunView:
    """Return the final view of a run; the first final word stands."""
    view = from_record(run, record, None)
    if view.accepted_mono_ns is None and record.wall_ns is not None:
        view = replace(view, accepted_mono_ns=event.t_mono_ns - record.wall_ns)
    return view


def staged(run: RunView, stage: StageRecord) -> RunView:
    """Return ``run`` with one stage brought up to date, in canonical order."""
    stages = {one.name: one for one in run.stages}
    known = stages.get(stage.name)
    if known is not None and _rank(stage) < _rank(known):
        return run
    stages[stage.name] = stage
    progress = run.progress
    if progress is not None and progress.stage == stage.name and stage.status.is_over:
        progress = None
    running = RunState.RUNNING if stage.name != "queue" and stage.status is not StageStatus.PENDING else run.state
    return replace(
        run,
        stages=_in_order(tuple(stages.values())),
        progress=progress,
        tier_from=_tier_found(stage) or run.tier_from,
        state=running,
    )


def progressed(run: RunView, progress: Progress) -> RunView:
    """Return ``run`` with ``progress``, unless it or that stage is over."""
    over = any(stage.name == progress.stage and stage.status.is_over for stage in run.stages)
    return run if over or run.state.is_terminal else replace(run, progress=progress)


def with_baseline(run: RunView, baselines: Mapping[BaselineKey, StageBaseline]) -> RunView:
    """Return ``run`` with history's medians for where it started from; a run that is over keeps its own."""
    if run.state.is_terminal and run.baseline is not None:
        return run
    baseline = baselines.get(run.baseline_key)
    return run if baseline is run.baseline else replace(run, baseline=baseline)


def _is_final(run: RunView | None) -> TypeGuard[RunView]:
    """Whether the host itself has said how the run ended; a run given up here may have begun there all the same."""
    return run is not None and run.state.is_terminal and run.is_accepted


def _merged(run: RunView, view: RunView) -> RunView:
    merged = replace(view, progress=run.progress)
    for stage in run.stages:
        known = next((one for one in merged.stages if one.name == stage.name), None)
        if known is None or _rank(stage) > _rank(known):
            merged = staged(merged, stage)
    return merged if run.state is RunState.QUEUED else replace(merged, state=run.state)


def _tier_found(stage: StageRecord) -> Tier | None:
    """The tier that preflight measured; acceptance can't know what the page cache holds."""
    found = stage.extra.get("tier_from") if stage.name == "preflight" else None
    return next((tier for tier in Tier if tier.value == found), None)


def _rank(stage: StageRecord) -> int:
    return _RANK.get(stage.status, 2)


def _in_order(stages: tuple[StageRecord, ...]) -> tuple[StageRecord, ...]:
    return tuple(sorted(stages[:STAGES_KEPT], key=lambda stage: _ORDER.get(stage.name, len(_ORDER))))
