"""The verbs, against a real agent on this machine and a node that nothing answers for."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import os
import pty
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from console.cli import run
from console.cli.common import Context
from console.cli.follow import Following
from console.cli.main import VERBS
from console.cli.park import choose_standby
from console.demo_teardown import MARK, end_nodes, marked_processes
from console.errors import UsageError
from console.fleet import Fleet
from db.database import open_history
from db.records import EventRow, Record, RunRow, StageRow
from db.writer import Writer
from remote_agent.protocol.messages import NATIVE_STAGES, Resident, RunState, Tier
from tests.console.fake_host import eventually
from tests.console.test_fleet import RECIPES, World
from tests.remote_agent.test_cache_store import keep as keep_warm_up

REPOSITORY = Path(__file__).parents[2]


class Place:
    """A configuration with two nodes: ``here`` runs the real agent, ``gone`` answers nothing."""

    def __init__(self, directory: Path) -> None:
        self.mark = secrets.token_hex(8)
        self.state = directory / "state"
        self.config = directory / "fleet.toml"
        self.history = directory / "history.db"
        self.log = directory / "log" / "glowplug.log"
        home = directory / "home"
        home.mkdir()
        environment = ["env", f"HOME={home}", f"{MARK}={self.mark}", f"PYTHONPATH={REPOSITORY}"]
        self.config.write_text(
            f"""
            [defaults]
            connect_timeout_s = 20
            [nodes.here]
            transport = {json.dumps(environment)}
            python = {json.dumps(sys.executable)}
            agent = ["-m", "remote_agent"]
            state_directory = {json.dumps(str(self.state))}
            tags = ["live"]
            [nodes.gone]
            transport = ["false"]
            connect_timeout_s = 0.5
            [recipes.missing]
            model = {{ path = "/no/such/model" }}
            devices = ["cpu"]
            """,
            encoding="utf-8",
        )

    def environ(self) -> dict[str, str]:
        return {
            "GLOWPLUG_CONFIG": str(self.config),
            "GLOWPLUG_HISTORY": str(self.history),
            "GLOWPLUG_LOG": str(self.log),
            "GLOWPLUG_STATE": str(self.log.parent),
        }


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    place = Place(tmp_path_factory.mktemp("cli"))
    yield place
    end_nodes([place.state], place.mark)
    assert marked_processes(place.mark) == ()


@pytest.fixture(autouse=True)
def environment(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in place.environ().items():
        monkeypatch.setenv(key, value)


def glowplug(*argv: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "console", *argv], capture_output=True, text=True, cwd=REPOSITORY, timeout=60, **options
    )  # type: ignore[call-overload,no-any-return]


def document(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    content = json.loads(capsys.readouterr().out)
    assert isinstance(content, dict)
    return content


# --- the agent answers ---------------------------------------------------------


def test_probe_tells_what_a_node_is(capsys: pytest.CaptureFixture[str]) -> None:
    """The probe of the real agent comes back as one document."""
    assert run(["probe", "here", "--json"]) == 0

    (node,) = document(capsys)["nodes"]  # type: ignore[misc]
    assert node["node"] == "here"
    assert node["probe"]["cpu_count"] == os.cpu_count()


def test_probe_for_people_names_the_node(capsys: pytest.CaptureFixture[str]) -> None:
    """A line for the host, a line for its GPUs or their absence."""
    assert run(["probe", "here"]) == 0

    assert capsys.readouterr().out.startswith("here  ")


def test_a_node_out_of_reach_is_exit_3_and_the_others_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """What answers is on stdout, what does not is in the document with its reason."""
    assert run(["status", "--json"]) == 3

    nodes = {node["node"]: node for node in document(capsys)["nodes"]}  # type: ignore[attr-defined]
    assert nodes["here"]["error"] is None
    assert "agentd" in nodes["here"]["processes"]
    assert nodes["gone"]["error"].startswith("gone: ")


def test_a_failed_run_is_exit_1_told_stage_by_stage_and_kept(capsys: pytest.CaptureFixture[str]) -> None:
    """warm names its nodes first; preflight's refusal stands in progress, in the document and in the history."""
    assert run(["warm", "missing", "here", "--json"]) == 1

    captured = capsys.readouterr()
    content = json.loads(captured.out)
    (live,) = content["runs"]
    assert captured.err.splitlines()[0] == "warm missing (/no/such/model) on 1 node: here"
    assert "✖ failed" in captured.err
    assert (live["status"], live["failure"]["stage"], live["node"]) == ("failed", "preflight", "here")
    assert [stage["name"] for stage in live["stages"]] == list(NATIVE_STAGES)
    assert sum(stage["attributed_ns"] for stage in live["stages"]) + live["unattributed_ns"] == live["wall_ns"]

    assert run(["show", live["run_uid"][:10], "--json"]) == 0
    stored = document(capsys)["run"]
    assert stored == live


def test_unreachable_alone_is_exit_3_and_failure_counts_more(capsys: pytest.CaptureFixture[str]) -> None:
    """A node out of reach is no failed run; together with one, the failed run decides."""
    assert run(["warm", "missing", "gone", "--json"]) == 3
    (error,) = document(capsys)["errors"]  # type: ignore[misc]
    assert (error["node"], error["exit_code"]) == ("gone", 3)

    assert run(["warm", "missing", "gone", "here", "--yes"]) == 1


@pytest.mark.parametrize(("options", "wanted"), [([], 3), (["--parallel", "2"], 2)], ids=["configured", "asked for"])
def test_how_many_load_at_once_is_what_was_asked_for_or_what_the_configuration_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], wanted: int
) -> None:
    """--parallel wins over the configuration's own number."""
    made: list[Fleet] = []
    real = Context.fleet

    def fleet(self: Context, *arguments: Any) -> Fleet:
        made.append(real(self, *arguments))
        return made[-1]

    monkeypatch.setattr(Context, "fleet", fleet)
    config = tmp_path / "fleet.toml"
    config.write_text(
        "[defaults]\nparallel = 3\nconnect_timeout_s = 0.5\n[nodes.gone]\ntransport = ['false']\n"
        "[recipes.missing]\nmodel = { path = '/no/such/model' }\n",
        encoding="utf-8",
    )

    assert run(["--config", str(config), "warm", "missing", "gone", *options]) == 3
    assert [one.parallel for one in made] == [wanted]


def test_no_wait_ends_once_the_run_is_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    """The exit code says that it was accepted, not how it will end."""
    assert run(["warm", "missing", "here", "--no-wait", "--json"]) == 0

    assert len(document(capsys)["runs"]) == 1  # type: ignore[arg-type]


def test_a_compile_cache_is_listed_and_cleared(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """The agent's own by default; a key that is not there is refused by the node."""
    assert run(["cache", "list", "here"]) == 0
    digest = keep_warm_up(place.state / "cache", "2.11", ("inductor/a.so",))
    capsys.readouterr()
    codes = [run(["cache", "list", "here"]), run(["cache", "clear", "here", "--key", digest[:6], "--yes"])]
    told = capsys.readouterr().out
    codes.append(run(["cache", "list", "here", "--json"]))
    listed = document(capsys)
    codes.append(run(["cache", "clear", "here", "--key", digest[:6]]))

    assert codes == [0, 0, 0, 1]
    assert told.startswith(f"{digest[:12]}  Llama")
    assert "here: 1 key cleared" in told
    assert (listed["entries"], listed["size_bytes"]) == ([], 0)
    assert "no key begins with" in capsys.readouterr().err


@pytest.mark.parametrize("what", [[], ["--all", "--key", "abcd"], ["--key", "?"], ["--older-than", "-1"]])
def test_clearing_a_cache_wants_one_thing_named(what: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A slip clears nothing, and no node is asked."""
    assert run(["cache", "clear", "gone", *what]) == 2

    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("days", ["-3", "1e+06", "nan"])
def test_an_age_is_refused_in_the_days_it_was_given_in(days: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Not as the wire's seconds."""
    assert run(["cache", "clear", "gone", "--older-than", days]) == 2

    assert capsys.readouterr().err == f"glowplug: --older-than: {days} is not within 0..100000 days\n"


def test_there_is_nothing_to_cancel_or_release_where_nothing_is(capsys: pytest.CaptureFixture[str]) -> None:
    """Both say so in one line, with the code for usage."""
    deadline = time.monotonic() + 20
    while run(["cancel", "here"]) != 2:  # the run of the test before may still be going
        assert time.monotonic() < deadline
    capsys.readouterr()

    assert run(["cancel", "here"]) == 2
    assert run(["release", "here", "--all"]) == 2

    assert capsys.readouterr().err.splitlines() == [
        "glowplug: nothing runs on here",
        "glowplug: nothing is warm on here",
    ]


def test_a_standby_that_can_t_be_armed_is_a_failed_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Preflight refuses as for any run; there is nothing to stop then, and that is said by the node."""
    assert run(["standby", "start", "missing", "here", "--json"]) == 1
    captured = capsys.readouterr()
    (live,) = json.loads(captured.out)["runs"]
    assert captured.err.splitlines()[0] == "arm missing (/no/such/model) on 1 node: here"
    assert (live["status"], live["failure"]["stage"]) == ("failed", "preflight")

    assert run(["standby", "stop", "missing", "here", "--json"]) == 1
    (answer,) = document(capsys)["nodes"]  # type: ignore[misc]
    assert answer["stopped"] == []
    assert "no process waits for or holds missing" in answer["error"]


def test_there_is_nothing_to_verify_or_stop_where_nothing_is_warm(capsys: pytest.CaptureFixture[str]) -> None:
    """The node says so, a node out of reach is another code, and what is to be asked must be named."""
    codes = [run(["verify", "here", "--recipe", "missing"]), run(["serve", "stop", "here"])]
    codes += [run(["verify", "here"]), run(["verify", "gone", "--model", "/m"])]
    told = capsys.readouterr()

    assert codes == [1, 1, 2, 3]
    assert "missing is not ready on this node: nothing of it is warm" in told.out
    assert "nothing serves on this node" in told.out
    assert "glowplug: name what to ask: give either --recipe or --model" in told.err


@pytest.mark.parametrize("option", [("--interval", "nan"), ("--interval", "601"), ("--count", "201")])
def test_what_no_agent_would_verify_is_a_usage_error(option: tuple[str, str]) -> None:
    """By the limits of the protocol itself, before anything is asked of a node."""
    assert run(["verify", "here", "--model", "/m", *option]) == 2


def test_there_is_nothing_to_park_where_no_standby_is(capsys: pytest.CaptureFixture[str]) -> None:
    """Both verbs say so in one line, with the code for usage."""
    assert [run(["park", "here"]), run(["unpark", "here"]), run(["park", "here", "llama"])] == [2, 2, 2]

    assert set(capsys.readouterr().err.splitlines()) == {"glowplug: no standby is on here: only those can be parked"}


def standby(uid: str, tier: Tier = Tier.STANDBY, recipe: str = "llama") -> Resident:
    return Resident(uid, recipe, f"/models/{recipe}", "GPU-1", tier, 1000, 7, "ada", 1)


@pytest.mark.parametrize(
    ("which", "found"),
    [(None, None), ("llama", "11112222"), ("/models/phi", "33334444"), ("3333", "33334444"), ("bert", "55556666")],
)
def test_a_standby_is_named_by_recipe_model_or_run(which: str | None, found: str | None) -> None:
    """Where it is not clear what is meant, what there is is named; what is no standby is the node's to refuse."""
    there = [standby("11112222"), standby("33334444", Tier.PARKED, "phi"), standby("55556666", Tier.RESIDENT, "bert")]
    if found is None:
        with pytest.raises(UsageError, match=r"say which of .* 11112222 \(llama standby\), 33334444 \(phi parked\)"):
            choose_standby(there, which, "here")
    else:
        assert choose_standby(there, which, "here") == found


@pytest.mark.parametrize(("which", "words"), [("gpt", "'gpt' is none of"), ("1111", "'1111' is several of")])
def test_a_name_that_fits_none_or_several_is_refused(which: str, words: str) -> None:
    """With the candidates; the only standby is meant where nothing is named."""
    there = [standby("11112222"), standby("11113333")]
    with pytest.raises(UsageError, match=f"{words} what is on here: 11112222 "):
        choose_standby(there, which, "here")

    assert choose_standby(there[:1], None, "here") == "11112222"


@pytest.mark.parametrize(("answer", "code"), [(b"n\n", 4), (b"\n", 4), (b"y\n", 1)])
def test_on_a_terminal_a_pattern_is_asked_about(answer: bytes, code: int) -> None:
    """What a pattern chose is named and must be confirmed; anything but yes changes nothing, exit code 4."""
    ours, theirs = pty.openpty()
    os.write(ours, answer)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "console", "warm", "missing", "her*", "--json"],
            stdin=theirs,
            stderr=theirs,
            stdout=subprocess.PIPE,
            cwd=REPOSITORY,
            timeout=60,
            check=False,
        )
        said = os.read(ours, 65536).decode()
    finally:
        os.close(ours)
        os.close(theirs)

    assert done.returncode == code
    assert "on 1 node: here" in said
    assert "Warm 1 node? [y/N]" in said
    assert bool(done.stdout) is (code == 1)


async def test_progress_is_told_once_and_what_waits_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With one place the second node waits and is seen waiting; a failed run decides over a node out of reach."""
    world = World(tmp_path)
    world.hosts["n3"].is_reachable = False
    following = Following()
    async with world.fleet(parallel=1) as fleet:
        warming = asyncio.ensure_future(following.warm(fleet, ["n1", "n2", "n3"], RECIPES["llama"], wait=True))
        await eventually(lambda: world.hosts["n1"].runs and following.outcomes["n3"].error)
        said: list[str] = []
        await eventually(lambda: said.append(capsys.readouterr().err) or "waits for a place" in "".join(said))
        (first,) = world.hosts["n1"].runs
        assert [one.node for one in following.going] == ["n1"]
        world.hosts["n1"].finish(first, RunState.FAILED)
        await eventually(lambda: world.hosts["n2"].runs)
        (second,) = world.hosts["n2"].runs
        world.hosts["n2"].finish(second)
        await warming

    told = ("".join(said) + capsys.readouterr().err).splitlines()
    assert [line.split()[0] for line in told if "weights done" in line] == ["n1", "n2"]
    assert len([line for line in told if "waits for a place" in line]) == 1
    assert (following.exit_code, following.going) == (1, [])
    assert [run["status"] for run in following.documents()] == ["failed", "ready"]
    assert [error["node"] for error in following.errors()] == ["n3"]


async def test_a_refusal_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the verb's own word; that of a run that waited for a place is the run's end."""
    world = World(tmp_path)
    world.hosts["n1"].is_refusing = world.hosts["n3"].is_refusing = True
    async with world.fleet(parallel=1) as fleet:
        armed = Following()
        await armed.warm(fleet, ["n1"], RECIPES["llama"], arm=True)
        assert capsys.readouterr().err.splitlines() == ["n1             not armed: /models/llama: no such directory"]
        warming = asyncio.ensure_future(Following().warm(fleet, ["n2", "n3"], RECIPES["llama"]))
        await eventually(lambda: world.hosts["n2"].runs)
        (uid,) = world.hosts["n2"].runs
        world.hosts["n2"].finish(uid)
        await warming

    assert capsys.readouterr().err.count("/models/llama: no such directory") == 1
    assert armed.exit_code == 1


async def test_a_lost_link_is_told_with_its_reason_while_the_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Waiting in silence looks like a hang; each loss and each return is said once."""
    world = World(tmp_path)
    following = Following()
    said: list[str] = []

    def told(words: str) -> int:
        said.append(capsys.readouterr().err)
        return "".join(said).count(words)

    async with world.fleet() as fleet:
        warming = asyncio.ensure_future(following.warm(fleet, ["n1"], RECIPES["llama"], wait=True))
        await eventually(lambda: world.hosts["n1"].runs)
        (uid,) = world.hosts["n1"].runs
        world.hosts["n1"].begin(uid)
        world.links["n1"].lose("the cable was cut")
        await eventually(lambda: told("the cable was cut; the run goes on"))
        assert not warming.done()
        world.links["n1"].connect()
        await eventually(lambda: told("linked again"))
        world.links["n1"].lose("once more")
        await eventually(lambda: told("once more"))
        world.hosts["n1"].finish(uid)
        world.links["n1"].connect()
        await warming

    assert (told("the cable was cut"), told("disconnected since"), following.exit_code) == (1, 2, 0)


# --- what is wrong is one line -----------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["warm", "missng", "here"], "no recipe 'missng'; did you mean missing?"),
        (["warm", "missing", "her"], "no node matches 'her'; did you mean here"),
        (["probe"], "Missing argument 'NODE...'"),
        (["frobnicate"], "No such command 'frobnicate'"),
        (["history", "--since", "yesterdayish"], "neither a span"),
        (["history", "--csv", "--json"], "not both"),
        (["show", "0000000000"], "0000000000"),
        (["demo", "--json"], "--headless"),
        (["cancel", "here", "--run", "x", "--all"], "not both"),
        (["--config", "", "config", "path"], "'--config': it is empty"),
        (["--history", "", "history"], "'--history': it is empty"),
        (["--log", "", "status"], "'--log': it is empty"),
        (["demo", "--headless", "--directory", ""], "'--directory': it is empty"),
        (["demo", "--headless", "--model", ""], "'--model': it is empty"),
        (["demo", "--headless", "--python", ""], "'--python': it is empty"),
    ],
)
def test_a_usage_error_is_one_line_and_exit_2(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """No traceback, nothing on stdout."""
    assert run(argv) == 2

    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("glowplug: ")
    assert words in line


def test_every_mistake_of_the_configuration_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """config check names file and line of each, as text and as a document."""
    wrong = tmp_path / "fleet.toml"
    wrong.write_text("[nodes.a]\nport = 70000\nfrob = 1\n", encoding="utf-8")
    monkeypatch.setenv("GLOWPLUG_CONFIG", str(wrong))

    assert run(["config", "check"]) == 2
    assert [line.split(": ")[1] for line in capsys.readouterr().err.splitlines()] == [f"{wrong}:2", f"{wrong}:3"]
    assert run(["config", "check", "--json"]) == 2
    assert len(document(capsys)["problems"]) == 2  # type: ignore[arg-type]


def test_the_example_is_a_configuration_without_a_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What config example prints, config check accepts."""
    assert run(["config", "example"]) == 0
    (tmp_path / "fleet.toml").write_text(capsys.readouterr().out, encoding="utf-8")

    assert run(["--config", str(tmp_path / "fleet.toml"), "config", "check"]) == 0


def test_config_path_says_where_files_are(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """Flags and environment are already in it."""
    assert run(["config", "path"]) == 0
    assert capsys.readouterr().out == f"{place.config}\n"

    assert run(["--history", "/elsewhere/h.db", "config", "path", "--json"]) == 0
    assert document(capsys)["history"] == "/elsewhere/h.db"


def test_an_error_of_our_own_is_one_line_and_its_traceback_is_in_the_log(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody sees a traceback, and nobody loses it."""
    monkeypatch.setattr("console.config.load", lambda path: 1 // 0)

    assert run(["status"]) == 1

    captured = capsys.readouterr()
    assert captured.err.startswith("glowplug: internal error: ZeroDivisionError")
    assert "Traceback" not in captured.err
    assert "Traceback" in place.log.read_text(encoding="utf-8")


# --- history -----------------------------------------------------------------------


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three runs, one of them with hostile text, an hour apart up to now."""
    path = tmp_path / "history.db"
    opened = open_history(path)
    writer = Writer(opened.path)
    now = time.time_ns()
    for number, (node, state, detail) in enumerate(
        [("a", "ready", None), ("a", "failed", "\x1b]52;c;eA==\x07\x1b[2Jno \u202ekernel"), ("=b", "ready", None)]
    ):
        uid = f"{number}aaaaaaa"
        event = EventRow("j", number + 1, node, uid, 1, now, "run.finished", "{}")
        row = RunRow(
            uid, node, "llama", "h", "/m", "ada", "ws", state, "cold", None, now - (2 - number) * 3600 * 10**9,
            ("cpu",), 1000, 100, 900, None, "worker_died" if detail else None, None, detail,
        )  # fmt: skip
        stages = (StageRow(5, "weights", "done", 0, 900 - number * 100, 900, 10**9, 4e9, 5e9, "mapped", None, "{}"),)
        writer.submit(Record(event, row, stages))
    assert writer.close()
    monkeypatch.setenv("GLOWPLUG_HISTORY", str(path))
    return path


def test_history_lists_the_newest_first_and_filters(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each filter narrows, and --since takes a span."""

    def uids(*argv: str) -> list[str]:
        assert run(["history", "--json", *argv]) == 0
        return [run["run_uid"][0] for run in document(capsys)["runs"]]  # type: ignore[attr-defined]

    assert uids() == ["2", "1", "0"]
    assert uids("--node", "a") == ["1", "0"]
    assert uids("--status", "ready", "--limit", "1") == ["2"]
    assert uids("--since", "90m") == ["2", "1"]
    assert uids("--since", "2999-01-01") == []
    assert uids("--recipe", "other") == []


def test_what_a_host_said_is_harmless_in_every_form(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Escape sequences, bidi and spreadsheet formulas reach neither terminal nor file."""
    for argv in (["history"], ["history", "--json"], ["history", "--csv"], ["show", "1aaaaaaa"]):
        assert run(argv) == 0
        out = capsys.readouterr().out
        assert "kernel" in out
        assert not set(out) & set("\x1b\x07\u202e")
        assert "52;c" not in out

    assert run(["history", "--csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["state"] for row in rows] == ["ready", "failed", "ready"]
    assert not any(cell.startswith("=") for row in rows for cell in row.values())


def test_show_draws_the_run_beside_the_one_before(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run before is of the same node and recipe, and each stage has its change."""
    assert run(["show", "1aaaaaaa"]) == 0

    out = capsys.readouterr().out
    assert "before: 0.0 ms from cold (0aaaaaaa" in out
    (weights,) = [line for line in out.splitlines() if " weights " in line]
    assert "−11 %" in weights
    assert "1.00 GB at 4.00 GB/s of 5.00 GB/s, mapped" in weights


def test_no_history_yet_is_an_empty_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A new machine has no past, and that is no error."""
    monkeypatch.setenv("GLOWPLUG_HISTORY", str(tmp_path / "none.db"))

    assert run(["history", "--json"]) == 0

    assert document(capsys) == {"runs": []}


# --- as a process ------------------------------------------------------------------


def test_the_console_itself_never_imports_torch() -> None:
    """Every module of it, its screens too, runs on a workstation that has none of a GPU host's packages."""
    program = (
        "import importlib, pkgutil, sys, console, db, themes;"
        "found = [module.name for package in (console, db, themes)"
        " for module in pkgutil.walk_packages(package.__path__, package.__name__ + '.')"
        " if not module.name.endswith('__main__')];"
        "[importlib.import_module(name) for name in found];"
        "print(len(found) > 100, sorted({'torch', 'transformers', 'safetensors', 'pynvml', 'cuda'} & set(sys.modules)))"
    )

    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=REPOSITORY)

    assert loaded.stdout == "True []\n"


def test_no_verb_imports_textual_or_torch() -> None:
    """The headless half starts without the screen's half, and never loads what only a GPU host needs.

    One process for all of them: whichever is the first to load any of it is named.
    """
    program = (
        "import sys, console.cli.main as m, console.fleet, console.link, console.transports.ssh\n"
        f"for verb in {sorted(VERBS)!r}:\n"
        "    assert m.glowplug.get_command(None, verb) is not None, verb\n"
        "    print(verb, sorted({'textual', 'torch', 'rich'} & set(sys.modules)))\n"
    )

    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=REPOSITORY)

    assert loaded.stdout.splitlines() == [f"{verb} []" for verb in sorted(VERBS)]


def test_the_version_needs_next_to_nothing() -> None:
    """--version answers without click, asyncio, asyncssh or sqlite: that is what keeps it quick."""
    program = (
        "import sys; before = set(sys.modules); from console.cli import run; code = run(['--version']);"
        "print(code, sorted({'click', 'asyncio', 'asyncssh', 'sqlite3', 'textual'} & (set(sys.modules) - before)))"
    )

    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=REPOSITORY)

    assert told.stdout.splitlines()[0].startswith("glowplug ")
    assert told.stdout.splitlines()[1] == "0 []"


@pytest.mark.parametrize("verb", [[], *([verb] for verb in VERBS), ["config", "check"]])
def test_every_verb_explains_itself(verb: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """--help is exit 0 and names the verb."""
    assert run([*verb, "--help"]) == 0

    assert f"Usage: {' '.join(['glowplug', *verb])}" in capsys.readouterr().out


def test_a_reader_that_has_had_enough_is_no_error(recorded: Path) -> None:
    """A closed pipe ends the verb quietly."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "console", "history"],
            stdout=writer,
            stderr=subprocess.PIPE,
            cwd=REPOSITORY,
            timeout=60,
            check=False,
        )
    finally:
        os.close(writer)

    assert (done.returncode, done.stderr) == (0, b"")


def test_output_holds_no_escape_sequence(recorded: Path) -> None:
    """Plain text under NO_COLOR and without it: nothing here depends on colour."""
    for environment in ({}, {"NO_COLOR": "1"}, {"FORCE_COLOR": "1"}):
        done = glowplug("history", env={**os.environ, **environment})
        assert done.returncode == 0
        assert "\x1b" not in done.stdout + done.stderr


def test_a_terminal_that_knows_no_unicode_gets_replacements(recorded: Path) -> None:
    """A glyph that can't be written does not end the verb."""
    done = glowplug("history", env={**os.environ, "PYTHONIOENCODING": "latin-1", "PYTHONUTF8": "0"})

    assert done.returncode == 0
    assert "? ready" in done.stdout
