"""Who watches a node: one at a time, for as long as the lease is renewed."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from db import rollouts
from db.database import open_history
from db.errors import WatchHeldError
from db.queries import History
from db.rollout_store import RolloutStore
from db.watch_store import WatchStore
from tests.db.test_rollouts import NODES, UID, Clock, S, rollout_row, turn

Open = Callable[..., WatchStore]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return open_history(tmp_path / "history.db").path


@pytest.fixture
def store(path: Path, clock: Clock) -> Iterator[Open]:
    """Return a function that opens the store as another process does."""
    with contextlib.ExitStack() as stack:

        def opened(holder: str, recipe: str = "llama") -> WatchStore:
            store = WatchStore(path, holder, (recipe, "resident"), ("ada", "desk"), clock_ns=clock)
            return stack.enter_context(contextlib.closing(store))

        yield opened


def test_a_second_watch_of_a_node_is_refused_and_told_who_has_it(store: Open, clock: Clock) -> None:
    """None of its nodes is taken then; another recipe's watch, and one of other nodes, are no hindrance."""
    one, other = store("one"), store("other")
    one.take(["a", "b"])
    clock.now_ns += 4 * S
    with pytest.raises(WatchHeldError, match=r"b is watched for llama by ada@desk \(one\); its lease has 6\.0 s left"):
        other.take(["b", "c"])
    store("third").take(["c"])

    store("bert", recipe="bert").take(["a"])


def test_a_clock_that_was_set_back_keeps_no_dead_watchs_node(store: Open, clock: Clock) -> None:
    """Another watch waits for one whole lease at most."""
    store("one").take(["a"])
    other = store("other")
    clock.now_ns -= 3600 * S
    with pytest.raises(WatchHeldError, match=r"its lease has 10\.0 s left"):
        other.take(["a"])
    clock.now_ns += 10 * S

    other.take(["a"])
    assert other.keep(["a"]) == ()


def test_a_lease_is_kept_by_renewing_it_and_is_free_once_it_ran_out(store: Open, clock: Clock) -> None:
    """Whoever finds that another took it meanwhile is told who; what is free is taken again."""
    one, other = store("one"), store("other")
    one.take(["a", "b"])
    for _ in range(3):
        clock.now_ns += 9 * S
        assert one.keep(["a", "b"]) == ()
    clock.now_ns += 10 * S
    other.take(["a"])
    lost = one.keep(["a", "b"])

    assert [(row.node, row.who, row.since_ns) for row in lost] == [("a", "ada@desk (other)", clock.now_ns)]
    with pytest.raises(WatchHeldError, match="b is watched"):
        other.take(["b"])


def test_what_is_given_back_is_free_at_once_and_nothing_of_anothers(store: Open, clock: Clock) -> None:
    """Also where the one that gives back has lost it."""
    one, other = store("one"), store("other")
    one.take(["a"])
    one.give_back(["a"])
    other.take(["a"])
    one.give_back(["a"])

    with pytest.raises(WatchHeldError):
        one.take(["a"])


def test_a_node_that_a_rollout_is_at_is_known(path: Path, clock: Clock) -> None:
    """While its attempt goes on or it is out of its traffic, in each rollout that is not over."""

    def claims(node: str) -> tuple[str, ...]:
        with History(path) as history:
            return rollouts.claims(history, node)

    with contextlib.closing(RolloutStore(path, "one", clock_ns=clock)) as store:
        store.create(rollout_row(), NODES)
        assert claims("a") == ()
        out = dataclasses.replace(NODES[0], state="failed", is_out=True)
        warming = dataclasses.replace(NODES[1], state="warming")
        store.record(UID, turn(nodes=(out, warming)))
        assert claims("a") == ("rollout pre-warm is at it (failed) and has it out of traffic",)
        assert claims("b") == ("rollout pre-warm is at it (warming)",)
        store.record(UID, turn(phase="aborted", is_over=True))
        assert claims("a") == claims("b") == ()
