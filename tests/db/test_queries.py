"""What the history answers, and that an index answers it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from db.database import connect
from db.errors import AmbiguousRunError, DamagedError
from db.queries import History, last_end_statement, runs_statement
from db.records import Record, RunFilter, SampleRow, StageRow
from db.store import Row, store_batch
from tests.db.histories import event_row, run_row, whole_run

NODES = ("gpu-1", "gpu-2")
RECIPES = ("llama", "bert")


def fill(path: Path, rows: list[Row]) -> None:
    with contextlib.closing(connect(path, read_only=False)) as connection:
        store_batch(connection, rows)


def finished(seq: int, run_uid: str, stages: tuple[StageRow, ...] = (), **changes: object) -> Record:
    """Return the one event of a run that ended; it started ``seq`` seconds after the epoch."""
    run = run_row(run_uid, **{"state": "ready", "started_ns": seq * 10**9, "wall_ns": seq * 100, **changes})
    return Record(event_row(seq, run_uid, node=run.node), run, stages)


@pytest.fixture
def history(history_path: Path) -> Iterator[History]:
    """Forty runs on two nodes of two recipes, every fifth failed, ``run-01`` the oldest."""
    rows: list[Row] = []
    for number in range(1, 41):
        recipe = RECIPES[number // 2 % 2]
        weights = StageRow(2, "weights", "done", start_ns=5, duration_ns=number * 10, attributed_ns=number)
        changes = {"node": NODES[number % 2], "recipe": recipe, "recipe_hash": f"{recipe}-hash"}
        state = "failed" if number % 5 == 0 else "ready"
        rows.append(finished(number, f"run-{number:02}", (weights,), state=state, first_output_ns=number, **changes))
    fill(history_path, rows)
    with History(history_path) as reader:
        yield reader


def uids(found: tuple[object, ...]) -> list[int]:
    return [int(getattr(run, "run_uid").removeprefix("run-")) for run in found]  # noqa: B009


def test_runs_come_newest_first_and_no_more_than_asked(history: History) -> None:
    """Without a filter the newest fifty come, with a limit that many."""
    assert uids(history.runs()) == list(range(40, 0, -1))
    assert uids(history.runs(RunFilter(limit=3))) == [40, 39, 38]


@pytest.mark.parametrize("mask", itertools.product([False, True], repeat=5))
def test_every_combination_of_filters_gives_what_a_plain_search_gives(history: History, mask: tuple[bool, ...]) -> None:
    """Filters combine: each answer equals filtering all runs in Python."""
    node, recipe, state, since_ns, before_ns = (
        value if used else None
        for value, used in zip(("gpu-2", "bert", "ready", 7 * 10**9, 31 * 10**9), mask, strict=True)
    )
    wanted = RunFilter(node, recipe, state, since_ns, before_ns)  # type: ignore[arg-type]
    expected = [
        run
        for run in history.runs()
        if (wanted.node is None or run.node == wanted.node)
        and (wanted.recipe is None or run.recipe == wanted.recipe)
        and (wanted.state is None or run.state == wanted.state)
        and (wanted.since_ns is None or run.started_ns >= wanted.since_ns)
        and (wanted.before_ns is None or run.started_ns < wanted.before_ns)
    ]

    assert list(history.runs(wanted)) == expected
    assert expected


def test_a_filter_for_what_never_was_gives_nothing(history: History) -> None:
    """An unknown node or recipe is no error."""
    assert history.runs(RunFilter(node="nowhere")) == ()
    assert history.runs(RunFilter(recipe="unknown")) == ()


def test_pages_go_back_without_a_run_missing(history: History) -> None:
    """Asking for what started before the last one seen reaches the oldest run."""
    seen: list[int] = []
    before_ns = None
    while page := history.runs(RunFilter(before_ns=before_ns, limit=7)):
        seen += uids(page)
        before_ns = page[-1].started_ns

    assert seen == list(range(40, 0, -1))


def test_every_field_comes_back_as_it_was_stored(history_path: Path) -> None:
    """A run, a stage, an event and a sample survive the way through the database unchanged."""
    run = run_row(
        "run-full", state="failed", tier_to="standby", devices=("cuda:0", "cuda:1"), wall_ns=1, unattributed_ns=2,
        first_output_ns=3, output="hello", failure_code="worker_died", failure_stage="weights", failure_detail="-9",
    )  # fmt: skip
    stage = StageRow(2, "weights", "failed", 1, 2, 3, 4, 5.5, 6.5, "staged", "because", '{"map_ns": 1}')
    event = event_row(1, "run-full", kind="run.finished")
    sample = SampleRow("gpu-1", "run-full", 5, '{"done": 1}')
    fill(history_path, [Record(event, run, (stage,)), sample])
    with History(history_path) as history:
        assert history.run("run-full") == (run, (stage,))
        assert history.runs_with_stages() == ((run, (stage,)),)
        assert history.events("run-full") == (event,)
        assert history.samples("run-full") == (sample,)


def test_a_run_is_found_by_the_beginning_of_its_uid(history: History) -> None:
    """Four characters or more are enough when they fit one run alone; an exact uid is never ambiguous."""
    found = history.run("run-07")

    assert found is not None
    assert found[0].run_uid == "run-07"
    assert history.run("run-9") is None
    assert history.run("run") is None
    assert history.run("") is None


def test_an_ambiguous_beginning_names_the_runs_that_fit(history: History) -> None:
    """The error lists the uids, so that the next attempt can be right."""
    with pytest.raises(AmbiguousRunError, match="run-10, run-11, ") as caught:
        history.run("run-1")
    assert caught.value.candidates == tuple(f"run-{number}" for number in range(10, 20))


def test_a_prefix_is_text_and_not_a_pattern(history: History) -> None:
    """Wildcards of SQL find nothing."""
    assert history.run("run-%") is None
    assert history.run("run__7") is None


@pytest.mark.parametrize("odd", ["run-\U0010ffff", "run-\ud7ff", "run-\udcff", "run-\x00", "\udcff" * 8])
def test_a_uid_of_odd_characters_names_no_run(history: History, odd: str) -> None:
    """What a shell hands over need not be text; it is not found, and nothing breaks."""
    assert history.run(odd) is None
    assert history.events(odd) == ()
    assert history.runs(RunFilter(node=odd)) == history.runs_with_stages(RunFilter(recipe=odd)) == ()


def test_events_and_samples_of_a_run_come_in_order(history_path: Path) -> None:
    """Events come by seq, samples by time, however they were stored."""
    samples = [SampleRow("gpu-1", "run-a", at_ns, "{}") for at_ns in (3, 1, 2)]
    fill(history_path, [*reversed(whole_run("run-a")), *samples])
    with History(history_path) as history:
        assert [event.seq for event in history.events("run-a")] == list(range(1, 11))
        assert [sample.t_wall_ns for sample in history.samples("run-a")] == [1, 2, 3]
        assert history.events("run-b") == ()


def test_a_run_that_nothing_described_is_not_listed(history_path: Path) -> None:
    """When the event that describes a run was trimmed on the host, its other events wait for the last one."""
    _accepted, *others = whole_run("run-a")
    fill(history_path, [*others[:-1]])
    with History(history_path) as history:
        assert (history.runs(), history.count(), history.run("run-a")) == ((), 0, None)
        fill(history_path, [others[-1]])

        assert history.count() == 1
        assert len(history.events("run-a")) == 9


def test_a_baseline_is_the_median_of_ready_runs_alone(history: History) -> None:
    """Failed runs, other nodes, recipes and tiers, and runs after the one in question don't count."""
    baseline = history.baseline("gpu-2", "llama-hash", "cold", before="run-21")

    assert baseline is not None
    assert baseline.recent_wall_ns == (100, 900, 1300, 1700)
    assert (baseline.count, baseline.wall_ns, baseline.stages_ns) == (4, 1100, {"weights": 110})
    assert baseline.first_output_ns == 11
    assert history.baseline("gpu-2", "llama-hash", "standby") is None


def test_a_baseline_takes_the_newest_runs(history: History) -> None:
    """With a count of three the three newest ready runs make it."""
    baseline = history.baseline("gpu-2", "llama-hash", "cold", count=3)

    assert baseline is not None
    assert baseline.recent_wall_ns == (2900, 3300, 3700)


def test_the_previous_run_is_ready_and_of_the_same_node_and_recipe(history: History) -> None:
    """The comparison for a run skips failed ones; the first run has none."""
    previous = history.previous_run("run-09")

    assert previous is not None
    assert (previous[0].run_uid, previous[1][0].duration_ns) == ("run-01", 10)
    assert history.previous_run("run-01") is None


def test_a_start_from_another_tier_is_no_comparison(history_path: Path) -> None:
    """A standby's fraction of a second says nothing about a start from disk."""
    tiers = ["cold", "standby", "cold", "cached"]
    fill(history_path, [finished(seq, f"run-{seq}", tier_from=tier) for seq, tier in enumerate(tiers, start=1)])

    with History(history_path) as reader:
        previous = reader.previous_run("run-3")
        assert previous is not None
        assert previous[0].run_uid == "run-1"
        assert reader.previous_run("run-4") is None


def test_armed_starts_are_compared_with_each_other_alone(history_path: Path) -> None:
    """One that loaded no weights is measured by such runs from the same tier, and no full start by it."""
    kinds = (
        ("cached", "standby"),
        ("cached", "armed"),
        ("resident", "armed"),
        ("cached", "armed"),
        ("cached", "standby"),
    )
    rows = [
        finished(seq, f"run-{seq}", tier_from=tier_from, tier_to=tier_to)
        for seq, (tier_from, tier_to) in enumerate(kinds, start=1)
    ]
    fill(history_path, list(rows))

    with History(history_path) as reader:
        previous = {seq: reader.previous_run(f"run-{seq}") for seq in range(1, 6)}
        armed = reader.baseline("gpu-1", "abcdef0123456789", "cached", armed=True)
        full = reader.baseline("gpu-1", "abcdef0123456789", "cached")
        earlier = reader.baseline("gpu-1", "abcdef0123456789", "cached", before="run-4", armed=True)

    assert {seq: found[0].run_uid for seq, found in previous.items() if found} == {4: "run-2", 5: "run-1"}
    assert (armed and armed.recent_wall_ns, full and full.recent_wall_ns) == ((200, 400), (100, 500))
    assert earlier is not None
    assert earlier.recent_wall_ns == (200,)


def test_the_last_end_of_a_node_is_that_of_its_newest_run_that_is_over(history_path: Path) -> None:
    """Neither a later event of an older run, nor a run under way, nor another node's; none without a run."""
    rows = [
        *whole_run("run-new", started_ns=9 * 10**9, state="failed"),
        *whole_run("run-old", first_seq=20, started_ns=5 * 10**9),
        Record(event_row(40, "run-now", kind="run.accepted"), run_row("run-now", started_ns=10 * 10**9)),
    ]
    fill(history_path, rows)

    with History(history_path) as reader:
        end = reader.last_end("gpu-1")
        assert end is not None
        assert (end.run_uid, end.kind, end.node) == ("run-new", "run.finished", "gpu-1")
        assert reader.last_end("gpu-2") is None


def test_the_last_end_is_read_through_an_index(history: History, history_path: Path) -> None:
    """From the newest run back, without sorting."""
    with contextlib.closing(connect(history_path, read_only=True)) as connection:
        statement, values = last_end_statement("gpu-1")
        plan = " ".join(row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {statement}", values))

    assert "runs USING INDEX runs_by_node" in plan
    assert "events USING INDEX events_by_run" in plan
    assert "TEMP B-TREE" not in plan


def test_names_and_counts_are_those_of_all_that_was_stored(history: History) -> None:
    """Nodes and recipes come sorted, once each; an unknown journal's cursor is 0."""
    assert (history.nodes(), history.recipes(), history.count()) == (NODES, tuple(sorted(RECIPES)), 40)
    assert (history.cursor("journal-1"), history.cursor("journal-2")) == (40, 0)


def test_an_open_reader_sees_what_is_written_later(history: History, history_path: Path) -> None:
    """A reader keeps no old snapshot."""
    fill(history_path, [finished(41, "run-41")])

    assert history.runs()[0].run_uid == "run-41"


FILTERS = {
    "newest": (RunFilter(), "runs_by_start"),
    "node": (RunFilter(node="gpu-1"), "runs_by_node"),
    "recipe": (RunFilter(recipe="llama"), "runs_by_recipe"),
    "state": (RunFilter(state="failed"), "runs_by_state"),
    "since": (RunFilter(since_ns=5), "runs_by_start"),
    "page": (RunFilter(before_ns=5), "runs_by_start"),
}


@pytest.mark.parametrize(("wanted", "index"), FILTERS.values(), ids=FILTERS.keys())
def test_the_newest_runs_are_read_through_an_index(
    history: History, history_path: Path, wanted: RunFilter, index: str
) -> None:
    """No list of runs scans the table, and the plain ones don't sort either."""
    with contextlib.closing(connect(history_path, read_only=True)) as connection:
        statement, values = runs_statement(wanted)
        plan = [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {statement}", values)]

    assert any(f"runs USING INDEX {index}" in step for step in plan), plan
    assert not any(step.startswith("SCAN runs") and "INDEX" not in step for step in plan), plan
    assert not any("TEMP B-TREE FOR ORDER BY" in step for step in plan), plan


def test_stages_events_and_prefixes_are_read_through_their_keys(history_path: Path) -> None:
    """What belongs to one run is looked up, never searched for."""
    statements = {
        "SELECT name FROM stages WHERE run_id = 1 ORDER BY ordinal": "SEARCH stages USING PRIMARY KEY",
        "SELECT kind FROM events WHERE run_id = 1 ORDER BY seq": "SEARCH events USING INDEX events_by_run",
        "SELECT kind FROM events WHERE journal_uuid = 'j' AND seq > 3 ORDER BY seq": "sqlite_autoindex_events_1",
        "SELECT model FROM runs WHERE run_uid >= 'a' AND run_uid < 'b'": "sqlite_autoindex_runs_1",
        "SELECT data_json FROM samples WHERE run_id = 1 ORDER BY t_wall_ns": "SEARCH samples USING PRIMARY KEY",
    }
    with contextlib.closing(connect(history_path, read_only=True)) as connection:
        for statement, step in statements.items():
            plan = " ".join(row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {statement}"))

            assert step in plan
            assert "TEMP B-TREE" not in plan


def test_damage_found_while_reading_is_an_error_of_the_history(history: History, history_path: Path) -> None:
    """A page that can't be read raises the package's own error, not SQLite's."""
    history.close()
    with contextlib.closing(connect(history_path, read_only=False)) as connection:
        root = connection.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'runs'").fetchone()[0]
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    with history_path.open("r+b") as file:
        file.seek((root - 1) * 4096)
        file.write(b"\xff" * 4096)

    with History(history_path) as reader, pytest.raises(DamagedError):
        reader.runs()
