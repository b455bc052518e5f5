"""``glowplug rollout status`` and the verbs on a stored rollout, with nobody carrying it out, or somebody else."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from console.cli import run
from console.cli.rollout_foreground import interrupted_text
from console.rollout import events as e
from console.rollout.machine import step
from console.rollout.saved import entry, node_rows, read_state, state_json
from console.rollout.states import NodeState, Phase, begin
from console.rollout.words import line
from db.errors import UnavailableError
from db.rollout_records import RolloutRow, TimelineRow, Turn
from db.rollout_store import RolloutStore
from tests.console.rollout.fakes import NAME, Desk, FakeEffects
from tests.console.rollout.world import rules

CONFIG = '[nodes.a]\n[nodes.b]\n[recipes.llama]\nmodel = { path = "/models/llama" }\n'


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    """A rollout of two batches of which nothing has been done."""
    (tmp_path / "fleet.toml").write_text(CONFIG)
    monkeypatch.setenv("GLOWPLUG_CONFIG", str(tmp_path / "fleet.toml"))
    monkeypatch.setenv("GLOWPLUG_HISTORY", str(tmp_path / "history.db"))
    monkeypatch.setenv("GLOWPLUG_LOG", str(tmp_path / "glowplug.log"))
    monkeypatch.setenv("GLOWPLUG_STATE", str(tmp_path))
    desk = Desk(tmp_path / "history.db", rules(), (("a",), ("b",)))
    yield desk
    desk.close()


def happened(desk: Desk, *events: e.Event) -> None:
    """Store what these events lead to, as a controller does that has ended since."""
    store = desk.store("gone")
    state = read_state(store.take(desk.uid).state_json)
    for event in events:
        state, _ = step(state, event)
        happening, rows = (entry("event", event),), node_rows(state)
        turn = Turn(state_json(state), state.phase.value, state.reason, state.phase.is_over, rows, happening)
        store.record(desk.uid, turn)
    store.give_back(desk.uid)


def said(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> str:
    """Return what a verb printed, stdout and then stderr."""
    assert run(["rollout", *argv]) == code
    told = capsys.readouterr()
    return told.out + told.err


def document(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> dict[str, Any]:
    content = json.loads(said(capsys, *argv, "--json", code=code))
    assert isinstance(content, dict)
    return content


def test_status_shows_nodes_what_is_waited_for_and_the_timeline(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    """By name, or by how the uid begins; that nobody carries it out stands there."""
    happened(
        desk, e.Begin(), e.NodeReached("a", 1, NodeState.WARMING), e.NodeReached("a", 1, NodeState.FAILED, "no memory")
    )
    shown = said(capsys, "status", NAME).splitlines()

    assert shown[:8] == [
        f"rollout pre-warm ({desk.uid[:8]}), recipe llama: aborting: 1 failed, max_failures 1: a",
        "  batch 1 of 2, 1 failure of 1",
        "  nobody carries it out: glowplug rollout abort pre-warm",
        "  a  batch 1  failed, attempt 1, out of traffic: no memory",
        "  b  batch 2  not begun",
        "  waits for a: back into its traffic",
        shown[6],
        shown[7],
    ]
    assert [line[19:] for line in shown[6:]] == ["begun", "a: warming", "a: failed: no memory"]
    assert said(capsys, "status", desk.uid[:6]).splitlines() == shown


def test_status_says_what_an_abort_called_off_and_what_was_never_begun(
    desk: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of what will not be begun any more nothing is pending, in words as in JSON."""
    happened(desk, e.Begin(), e.NodeReached("a", 1, NodeState.WARMING), e.Abort("wrong model"), e.BackedOut("a", True))
    lines, nodes = said(capsys, "status", NAME).splitlines(), document(capsys, "status", NAME)["nodes"]

    assert "  a  batch 1  called off, attempt 1: aborted" in lines
    assert "  b  batch 2  not begun" in lines
    assert [node["state"] for node in nodes] == ["called off", "not begun"]
    assert "pending" not in "".join(lines)


def test_status_reads_no_more_of_a_long_timeline_than_it_shows(
    desk: Desk, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line more tells that there are others; entries without a line are passed over, however many they are."""
    read: list[TimelineRow] = []

    def noted(entry: TimelineRow) -> str | None:
        read.append(entry)
        return line(entry)

    happened(desk, e.Begin(), *(e.Tick(float(now)) for now in range(1, 40)))
    happened(desk, *(e.AvailabilityChanged("b", number % 2 == 0) for number in range(21)), *(e.Tick(400.0),) * 9)
    monkeypatch.setattr("console.rollout.status_text.line", noted)
    shown = said(capsys, "status", NAME).splitlines()

    assert len({entry.entry_id for entry in read}) == 9 + 21
    assert [text[19:] for text in shown[-20:]] == ["b: can be reached again", "b: out of reach"] * 10


def test_status_says_where_the_earlier_lines_are_that_it_leaves_out(
    desk: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    """The newest twenty are shown; a timeline of so many has no others."""
    tries = [e.NodeReached("a", 1, NodeState.WARMING, str(number)) for number in range(20)]
    where = "  earlier lines: glowplug rollout status pre-warm --json"
    happened(desk, e.Begin(), *tries[:19])
    assert where not in said(capsys, "status", NAME)
    happened(desk, tries[19])
    shown = said(capsys, "status", NAME).splitlines()

    assert [line[19:] for line in shown[shown.index(where) + 1 :]] == [f"a: warming: {number}" for number in range(20)]


def test_status_as_json_has_all_of_it(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    """Durations aside, what the history has."""
    happened(desk, e.Begin())
    content = document(capsys, "status", NAME)

    assert (content["rollout"], content["phase"], content["controller"]) == (NAME, "running", None)
    assert content["waiting_for"] == ["a: draining"]
    assert content["nodes"][0] == {
        "node": "a", "batch": 1, "state": "draining", "reason": "", "attempt": 1, "out_of_traffic": True,
        "may_go_on": [],
    }  # fmt: skip
    assert [(one["kind"], one["what"], one["data"]) for one in content["timeline"]] == [("event", "Begin", {})]
    assert [one["rollout_uid"] for one in document(capsys, "status")["rollouts"]] == [desk.uid]


def test_a_run_that_may_go_on_stands_under_its_node(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    """Until its node has said that it has ended; also once the rollout is over."""
    why = "no answer within 10 s"
    happened(desk, e.Begin(), e.Skip("a", "bad disk"), e.StopEnded("a", 1, False, why))
    assert (
        f"     the run of attempt 1 may go on there: {why}; it is asked again"
        in said(capsys, "status", NAME).splitlines()
    )
    happened(desk, e.Abort(), e.StopEnded("a", 1, False, why), e.BackedOut("a", True))

    assert desk.state().phase is Phase.ABORTED
    assert f"     the run of attempt 1 may go on there: {why}" in said(capsys, "status", NAME).splitlines()
    assert document(capsys, "status", NAME)["nodes"][0]["may_go_on"] == [{"attempt": 1, "reason": why}]


def test_hostile_text_of_a_host_is_cleaned_on_its_way_out(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    """In the lines as in the document."""
    happened(desk, e.Begin(), e.NodeReached("a", 1, NodeState.FAILED, "\x1b]52;c;AAAA\x07gone\x1b[2J"))

    assert "\x1b" not in said(capsys, "status", NAME)
    assert "\\u001b" not in json.dumps(document(capsys, "status", NAME))


def test_a_pause_and_a_skip_need_no_controller(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    """They are stored, by whom, and nobody has the lease after."""
    happened(desk, e.Begin())
    assert said(capsys, "pause", NAME) == "pause pre-warm: paused\n"
    answer = document(capsys, "skip", NAME, "b", "--reason", "bad disk")
    again = said(capsys, "skip", NAME, "b", "--reason", "again", code=1)

    assert (answer["verb"], answer["done"], answer["answer"]) == ("skip", True, "b is skipped")
    assert again == "skip pre-warm: b is skipped; it can be skipped while it is not ready\n"
    record, state = desk.read(), desk.state()
    assert state.phase is Phase.PAUSED
    assert state.nodes[1].skip_reason == "bad disk"
    assert record.row.lease is None
    assert [one.what for one in record.timeline if one.kind == "command"] == ["pause", "skip", "skip"]


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (("status", "no-such"), "no rollout 'no-such' was ever started here"),
        (("pause", "no-such"), "no rollout 'no-such' was ever started here"),
        (("skip", NAME, "a"), "Missing option '--reason'"),
        (("skip", NAME, "a", "--reason", " "), "--reason: say why the node is left out"),
        (("start", "no-such"), "no rollout 'no-such'"),
    ],
)
def test_what_can_not_be_meant_is_exit_2(
    desk: Desk, capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], text: str
) -> None:
    """One line says what."""
    assert text in said(capsys, *argv, code=2)


def test_a_rollout_that_is_over_takes_no_verb(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    """It stays as it is."""
    happened(desk, e.Begin(), e.Abort("wrong model"), e.StopEnded("a", 1, True), e.BackedOut("a", True))

    for verb in (("pause", NAME), ("resume", NAME), ("retry", NAME, "a"), ("abort", NAME)):
        assert said(capsys, *verb, code=2) == "glowplug: rollout pre-warm is over: aborted: wrong model\n"


def test_nothing_was_ever_started_where_there_is_no_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And none is made."""
    monkeypatch.setenv("GLOWPLUG_HISTORY", str(tmp_path / "none.db"))

    assert said(capsys, "status") == ""
    assert "was ever started here" in said(capsys, "status", NAME, code=2)
    assert not (tmp_path / "none.db").exists()


class Elsewhere:
    """A controller in a thread, as good as another process: the history is all that it shares."""

    def __init__(self, desk: Desk, effects: FakeEffects) -> None:
        self._desk = desk
        self._effects = effects
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Elsewhere:
        self._thread.start()
        assert self._ready.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(RuntimeError):  # it is over, and its loop closed
            self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(30)

    def _run(self) -> None:
        async def work() -> None:
            self._loop = asyncio.get_running_loop()
            self._task = asyncio.ensure_future(self._desk.controller(self._effects, "elsewhere:1:aa").run())
            self._ready.set()
            await asyncio.wait({self._task})

        asyncio.run(work())


def test_a_running_controller_is_asked_and_its_answer_told(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    """With the exit code that fits it; status names who carries the rollout out."""
    effects = FakeEffects()
    effects.held.add(e.StartNode)
    with Elsewhere(desk, effects):
        assert said(capsys, "pause", NAME) == "pause pre-warm: paused\n"
        assert "  carried out by elsewhere:1:aa\n" in said(capsys, "status", NAME)
        holder = document(capsys, "status", NAME)["controller"]
        assert holder["holder"] == "elsewhere:1:aa"
        assert holder["seconds_left"] > 0
        refused = document(capsys, "retry", NAME, "b", code=1)
        assert refused["answer"] == "b is pending; it can be tried again once it has failed"
        assert said(capsys, "resume", NAME) == "resume pre-warm: it goes on\n"
        everything = said(capsys, "promote", NAME, "--all")
        assert everything == "promote pre-warm: it will not pause after a batch any more\n"
        assert said(capsys, "abort", NAME) == "abort pre-warm: it is aborting\n"


def test_a_verb_that_another_one_is_ahead_of_asks_that_one(
    desk: Desk, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have seen that nobody carries it out, and the other one does when this one wants to: no abort is lost."""
    take, others, effects = RolloutStore.take, contextlib.ExitStack(), FakeEffects()
    effects.held.add(e.StartNode)

    def late(store: RolloutStore, rollout_uid: str) -> RolloutRow:
        monkeypatch.setattr(RolloutStore, "take", take)
        others.enter_context(Elsewhere(desk, effects))
        return take(store, rollout_uid)

    monkeypatch.setattr(RolloutStore, "take", late)
    with others:
        assert said(capsys, "abort", NAME) == "abort pre-warm: it is aborting\n"


def test_a_controller_that_ends_without_an_answer_is_said(
    desk: Desk, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was asked is taken back, so that it is not done unseen."""
    store = desk.store("silent")
    store.lease_s = 0.3
    store.take(desk.uid)
    text = said(capsys, "promote", NAME, code=1)

    assert text == "glowplug: the controller of rollout pre-warm has ended; nothing was done, say it again\n"
    assert store.asked(desk.uid) == ()


def test_a_lease_that_can_not_be_given_back_changes_nothing_about_the_outcome(
    desk: Desk, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs out by itself; what was asked is done, and that is the exit code."""

    def locked(store: RolloutStore, rollout_uid: str) -> None:
        raise UnavailableError("another program keeps it locked")

    happened(desk, e.Pause())
    monkeypatch.setattr(RolloutStore, "give_back", locked)

    assert "aborted" in said(capsys, "abort", NAME)
    assert desk.state().phase is Phase.ABORTED


def test_an_interrupted_rollout_names_the_verbs_that_bring_it_on() -> None:
    """An abort that is under way only goes on: resume would be refused."""
    state = begin(rules(), (("a",), ("b",)))
    warming = replace(state, phase=Phase.PAUSED, nodes=(replace(state.nodes[0], state=NodeState.WARMING),))
    resume, abort = (f"\n  glowplug rollout {verb} pre-warm" for verb in ("resume", "abort"))

    assert interrupted_text(NAME, warming) == (
        f"interrupted; rollout pre-warm is paused; what runs on a goes on there. To go on, or to end it:{resume}{abort}"
    )
    assert interrupted_text(NAME, replace(state, phase=Phase.ABORTING)) == (
        f"interrupted; rollout pre-warm is aborting. To bring that to its end:{abort}"
    )
    assert interrupted_text(NAME, replace(state, phase=Phase.DONE)) == "interrupted; rollout pre-warm is done"


def test_an_abort_that_its_console_left_behind_is_brought_to_its_end_by_another(
    desk: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the verb that the message names."""
    happened(desk, e.Begin(), e.Abort("wrong model"), e.StopEnded("a", 1, True))

    assert "aborted: wrong model" in said(capsys, "abort", NAME)
    assert desk.state().phase is Phase.ABORTED


def test_a_rollout_with_nodes_that_are_not_in_the_fleet_is_not_taken_over(
    desk: Desk, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It stays free for whoever has them."""
    (tmp_path / "fleet.toml").write_text(CONFIG.replace("[nodes.b]\n", ""))
    text = said(capsys, "resume", NAME, code=2)

    assert text.splitlines()[-1] == "glowplug: rollout pre-warm has node b, which this fleet has not"
    assert desk.read().row.lease is None
