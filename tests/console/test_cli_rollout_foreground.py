"""A rollout in the foreground of a verb: what it does beside its links, and what an interruption leaves."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from console.cli.common import Context
from console.cli.rollout_foreground import Foreground, opened_store
from console.config import Config
from console.locations import locations
from console.rollout.beginning import planned
from console.rollout.idle import apply_idle
from console.rollout.plan import Plan
from console.rollout.states import Phase, RolloutState
from db import rollouts
from db.queries import History
from db.rollout_records import RolloutRow
from db.rollout_store import RolloutStore
from tests.console.fake_host import eventually
from tests.console.rollout.fakes import Desk
from tests.console.rollout.world import rules

CONFIG = """
[nodes.a]
transport = ["/bin/false"]
[recipes.llama]
model = { path = "/models/llama" }
[[rollout]]
name = "pre-warm"
selector = "all"
recipe = "llama"
"""


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Context:
    (tmp_path / "fleet.toml").write_text(CONFIG)
    monkeypatch.setenv("GLOWPLUG_CONFIG", str(tmp_path / "fleet.toml"))
    monkeypatch.setenv("GLOWPLUG_HISTORY", str(tmp_path / "history.db"))
    return Context(locations(os.environ), os.environ)


def plan(context: Context) -> tuple[Config, Plan]:
    config = context.load_config()
    return config, planned(config, "pre-warm", context.locations.history_file)


def found(context: Context) -> RolloutRow | None:
    with History(context.locations.history_file) as history:
        return rollouts.find(history, "pre-warm")


class Held:
    """``create`` of every store, which ends once it is let go of."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.let_go = threading.Event(), threading.Event()
        real = RolloutStore.create

        def create(store: RolloutStore, *arguments: Any) -> None:
            self.begun.set()
            assert self.let_go.wait(30)
            real(store, *arguments)

        monkeypatch.setattr(RolloutStore, "create", create)


async def test_one_that_is_interrupted_while_it_is_stored_is_paused_and_nobodys(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is there by then, so it must not keep its lease; the loop goes on while the history is locked."""
    config, wanted = plan(context)
    held = Held(monkeypatch)
    with opened_store(context) as store:
        foreground = Foreground(context, store)
        beginning = asyncio.ensure_future(foreground.begin(config, wanted, config.recipe("llama")))
        await eventually(held.begun.is_set)
        beginning.cancel()
        held.let_go.set()
        await asyncio.wait({beginning})

    assert beginning.cancelled()
    row = found(context)
    assert row is not None
    assert (row.phase, row.reason, row.lease) == ("paused", "interrupted", None)
    assert "glowplug rollout resume pre-warm" in foreground.explain()


def test_the_history_is_never_waited_for_on_the_event_loop(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats of links would wait with it, for as long as another program keeps it locked."""
    config, wanted = plan(context)
    asked: set[str] = set()
    on_loop: list[str] = []

    def noted(name: str) -> Callable[..., Any]:
        real = getattr(RolloutStore, name)

        def call(*arguments: Any) -> Any:
            asked.add(name)
            if threading.current_thread() is threading.main_thread():
                on_loop.append(name)
            return real(*arguments)

        return call

    names = {"create", "take", "ask", "record", "give_back"}
    with contextlib.closing(Desk(context.locations.history_file, rules(hooks=()), (("a",),))) as desk:
        apply_idle(desk.store("gone"), desk.uid, "pause", {}, "ada@desk")
        row = desk.read().row
    for name in names:
        monkeypatch.setattr(RolloutStore, name, noted(name))
    with opened_store(context) as store:
        taken_over = Foreground(context, store).ask(row, "abort", {})
        _, started = Foreground(context, store).start(config, wanted, config.recipe("llama"))

    assert isinstance(taken_over, RolloutState)
    assert (taken_over.phase, started.phase) == (Phase.ABORTED, Phase.ABORTED)
    assert asked == names
    assert on_loop == []
