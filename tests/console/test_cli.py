"""The verbs, against a real agent on this machine and a node that nothing answers for."""

from __future__ import annotations

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
from console.demo_teardown import MARK, end_nodes, marked_processes
from console.fleet import Fleet
from remote_agent.protocol.messages import NATIVE_STAGES
from tests.console.verbs import REPOSITORY, document
from tests.remote_agent.test_cache_store import keep as keep_warm_up


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
