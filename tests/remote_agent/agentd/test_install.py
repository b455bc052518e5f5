"""``install``: one version follows another, and what is interrupted anywhere leaves the one before at work."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from console.deployment.agent_file import PYZ_NAME, build_content, write_file
from remote_agent.agentd.daemon import holder
from remote_agent.agentd.paths import StateDir
from remote_agent.client import connect_running, open_client
from remote_agent.protocol.messages import Empty, RunResult, RunUidParams, StatusResult, Tier
from remote_agent.versions import Versions, digest_of
from tests.remote_agent.agentd.agents import DEADLINE_S, REPOSITORY, Agent, eventually, is_running

pytestmark = pytest.mark.faults

STEPS = {"fcntl.flock", "os.chmod", "os.link", "os.mkdir", "os.remove", "os.rename", "os.symlink", "subprocess.Popen"}
"""What Python tells an audit hook of before it is done: every change that an installation makes, and its children."""

KILLED_BEFORE_EACH = f"""
import json, os, shutil, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from remote_agent.verbs.install import main
from remote_agent.versions import Versions, digest_of
link, one = Path(sys.argv[2]), Path(sys.argv[3])

def install(left):
    def look(event, arguments):
        nonlocal left
        if event in {STEPS}:
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(look)
    os._exit(main(sys.argv[4:]))

for number in range(1, 100):
    shutil.rmtree(link.parent, ignore_errors=True)
    versions = Versions(link)
    with versions.alone():
        versions.switch(versions.store(one))
    child = os.fork() or install(number)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    found = versions.current()
    print(json.dumps([code, found.parent.name, digest_of(found)]), flush=True)
    if code != -signal.SIGKILL:
        break
"""
"""Installs a file over another again and again, each time killed before the next step, until none is left."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two versions of the agent that work, and one whose daemon does not start."""
    folder = tmp_path_factory.mktemp("files")
    content = build_content(REPOSITORY / "remote_agent", (REPOSITORY / "LICENSE").read_bytes())
    made = {name: folder / f"{name}.pyz" for name in ("one", "two", "broken")}
    for name, path in made.items():
        write_file(path, content)
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr("NAME", name)
    _break(made["broken"])
    return made


def _break(file: Path) -> None:
    """Have an agent's daemon of that file end before it listens."""
    with zipfile.ZipFile(file) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    contents["remote_agent/agentd/server.py"] = b"raise SystemExit('this one is broken')\n"
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in contents.items():
            archive.writestr(name, content)


class Installation:
    """One link and the state directory of its agent."""

    def __init__(self, folder: Path, state: StateDir) -> None:
        self.versions, self.state = Versions(folder / "share" / PYZ_NAME), state

    def command(self, file: Path, *words: str) -> list[str]:
        places = ["--link", str(self.versions.link), "--state-dir", str(self.state.root)]
        return [str(file), "install", *places, *words]

    def install(self, file: Path, *words: str) -> subprocess.CompletedProcess[str]:
        return run([sys.executable, "-S", *self.command(file, *words)])

    def done(self, file: Path, *words: str) -> dict[str, Any]:
        said = self.install(file, "--json", *words)
        assert said.returncode == 0, said
        document: dict[str, Any] = json.loads(said.stdout)
        return document

    def make_current(self, file: Path) -> None:
        """Have a version in place without an agent."""
        with self.versions.alone():
            self.versions.switch(self.versions.store(file))

    def digest(self) -> str:
        """Return which version is current, seen to be whole."""
        current = self.versions.current()
        assert current is not None
        assert digest_of(current) == current.parent.name
        return current.parent.name

    def agent_file(self) -> Path:
        """Return the file that the agent at work was started from."""
        pid = holder(self.state)
        assert pid is not None
        return Path(os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[1]))

    def status(self) -> StatusResult:
        with open_client(self.state, "test", connect_running) as client:
            return client.call("status", Empty(), StatusResult)

    def stop(self) -> None:
        if self.state.run.exists():
            run(
                [
                    sys.executable,
                    "-m",
                    "remote_agent",
                    "stop",
                    "--force",
                    "--keeper",
                    "--state-dir",
                    str(self.state.root),
                ]
            )


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60, check=False
    )


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Installation]:
    """A place for an agent, which is ended with the test."""
    place = Installation(tmp_path, StateDir(tmp_path / "state"))
    yield place
    place.stop()


def test_a_version_takes_over_from_the_one_before_and_gives_back(place: Installation, files: dict[str, Path]) -> None:
    """The first is started; the second ends it and runs from its own file; the former's `install` is the way back."""
    first = place.done(files["one"])
    second = place.done(files["two"])
    former = place.versions.former()
    assert former is not None
    back = place.done(former)

    assert (first["before"], second["before"], back["before"]) == (None, first["digest"], second["digest"])
    assert [one["was_running"] for one in (first, second, back)] == [False, True, True]
    assert not is_running(first["pid"])
    assert not is_running(second["pid"])
    assert (place.digest(), holder(place.state)) == (first["digest"], back["pid"])
    assert place.agent_file() == Path(back["path"])
    assert place.done(former)["pid"] == back["pid"], "what is current and runs is left alone"


def test_a_run_is_finished_by_the_agent_that_began_it(
    make_agent: Callable[..., Agent], tmp_path: Path, files: dict[str, Path]
) -> None:
    """Without --wait it is named and nothing is switched; with it, its end is waited for. A resident is still there."""
    agent = make_agent()
    place = Installation(tmp_path, agent.state)
    place.make_current(files["one"])
    with agent.client("") as client:
        client.warm(agent.params("", target_tier="resident"))
        params = agent.params("hang:first_request")
        client.begin(params)
        client.stage(params.run_uid, "first_request")
        refused = place.install(files["two"])
        current = place.digest()
        waiting = subprocess.Popen(
            [sys.executable, "-S", *place.command(files["two"], "--wait", "60")], stderr=subprocess.PIPE, text=True
        )
        assert waiting.stderr is not None
        said = waiting.stderr.readline()
        client.call("run.cancel", RunUidParams(params.run_uid), RunResult)
    assert waiting.wait(DEADLINE_S) == 0
    waiting.stderr.close()

    try:
        assert (refused.returncode, current) == (1, digest_of(files["one"]))
        assert f"still here: run {params.run_uid}" in refused.stderr
        assert f"waiting: still here: run {params.run_uid}" in said
        assert place.digest() == digest_of(files["two"])
        held = eventually(lambda: place.status().residents, "the new agent finds what the keeper holds")
        assert [(one.recipe, one.tier) for one in held] == [("tiny", Tier.RESIDENT)]
    finally:
        place.stop()


def test_a_wait_ends_with_whoever_waits(agent: Agent, tmp_path: Path, files: dict[str, Path]) -> None:
    """A console that is gone does not find another version an hour later."""
    place = Installation(tmp_path, agent.state)
    place.make_current(files["one"])
    with agent.client("") as client:
        client.warm(agent.params())  # a standby, whose process would end with its agent
    command = [sys.executable, "-S", *place.command(files["two"], "--wait", "3600", "--tell", "token")]
    waiting = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert waiting.stdout is not None
    assert [waiting.stdout.readline() for _ in range(2)][1].startswith(
        'token {"step": "waiting: still here: tiny on cpu'
    )
    out, _ = waiting.communicate(timeout=DEADLINE_S)

    assert waiting.returncode == 1
    assert '"code": "called_off"' in out
    assert (place.digest(), holder(agent.state)) == (digest_of(files["one"]), agent.pid)


def test_a_version_that_does_not_start_is_taken_back(place: Installation, files: dict[str, Path]) -> None:
    """The one before is current and at work again, and the new one's own words say why."""
    before = place.done(files["one"])
    said = place.install(files["broken"])

    assert said.returncode == 1
    assert "the new agent does not start: " in said.stderr
    assert "this one is broken" in said.stderr
    assert f"{before['digest']} is current again" in said.stderr
    assert (place.digest(), str(place.agent_file())) == (before["digest"], before["path"])


def test_killed_before_any_step_it_leaves_a_version_that_is_whole(place: Installation, files: dict[str, Path]) -> None:
    """Every step in turn, from the same beginning; the installation after the last one goes through."""
    one, two = digest_of(files["one"]), digest_of(files["two"])
    words = [str(files["two"]), str(place.versions.link), str(files["one"]), *place.command(files["two"])[2:]]
    said = run([sys.executable, "-S", "-c", KILLED_BEFORE_EACH, *words])
    rounds = [json.loads(line) for line in said.stdout.splitlines() if line.startswith("[")]
    codes, names, contents = zip(*rounds, strict=True)

    assert codes == (*[-signal.SIGKILL] * (len(codes) - 1), 0), said
    assert len(codes) > 10
    assert contents == names, "what is current is whole"
    assert names == tuple(sorted(names, key=[one, two].index)), "the switch is one step"
    assert set(names) == {one, two}


def test_two_installations_do_not_meet(place: Installation, files: dict[str, Path]) -> None:
    """The second is refused and names what it found."""
    place.make_current(files["one"])
    with place.versions.alone():
        said = place.install(files["two"])

    assert (said.returncode, said.stderr.count("\n")) == (1, 1)
    assert "another installation is under way" in said.stderr
