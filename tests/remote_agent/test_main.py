"""The agent's command line ends in an exit code and plain lines, whatever becomes of its streams."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
DEADLINE_S = 60


def shell(line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a shell line in which ``$AGENT`` is the agent's command; the first failing program gives the exit code."""
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", line],
        cwd=REPOSITORY,
        env={**os.environ, "AGENT": f"{sys.executable} -m remote_agent", "PYTHONUNBUFFERED": "", **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", ["probe", "--help", "--version", "preflight --help", "bridge --help"])
def test_a_full_stdout_is_one_line_and_exit_1(words: str, unbuffered: str) -> None:
    """Output that is lost is told, and only that, however it is buffered."""
    done = shell(f"$AGENT {words} >/dev/full", PYTHONUNBUFFERED=unbuffered)

    assert (done.returncode, done.stderr) == (1, "stdout: No space left on device\n")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", ["probe --json", "--help", "status --help"])
def test_a_reader_who_goes_away_is_no_failure(words: str, unbuffered: str) -> None:
    """A closed pipe ends the verb with exit 0 and not a word."""
    done = shell(f"$AGENT {words} | exec 0<&-", PYTHONUNBUFFERED=unbuffered)

    assert (done.returncode, done.stderr) == (0, "")


def test_a_closed_stdout_is_told() -> None:
    """No file that is opened later takes stdout's number, since nothing is done."""
    done = shell("$AGENT probe >&-")

    assert (done.returncode, done.stdout, done.stderr) == (1, "", "stdout: closed\n")


def test_a_closed_stderr_changes_nothing(tmp_path: Path) -> None:
    """What is meant for stderr does not get into stdout."""
    done = shell(f"$AGENT status --state-dir {tmp_path}/none 2>&- <&-")

    assert (done.returncode, done.stdout) == (1, "")


@pytest.mark.parametrize("verb", ["status", "stop", "release --all"])
def test_a_state_directory_that_cannot_be_reached_is_one_line(verb: str) -> None:
    """The path and the system's word for what is wrong, and exit 1."""
    name = "x" * 300
    done = shell(f"$AGENT {verb}", XDG_STATE_HOME=f"/tmp/{name}")

    assert done.returncode == 1
    assert done.stderr == f"glowplug-agent: /tmp/{name}/glowplug-agent/run: File name too long\n"


def broken_verb(line: str, debug: str = "") -> subprocess.CompletedProcess[str]:
    """Run the command line with a ``status`` whose body is ``line``."""
    code = (
        "import sys, signal, os; from remote_agent import __main__ as command; from remote_agent.verbs import status\n"
        f"def main(argv):\n    {line}\n"
        "status.main = main; sys.exit(command.main(['status']))"
    )
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPOSITORY,
        env={**os.environ, "GLOWPLUG_DEBUG": debug},
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )


def test_a_programming_error_is_one_line_unless_it_is_looked_for() -> None:
    """Its type and words stand in the line; GLOWPLUG_DEBUG=1 shows the traceback too."""
    plain, debug = broken_verb("{}['lost']"), broken_verb("{}['lost']", debug="1")

    line = "glowplug-agent: internal error: KeyError: 'lost' (GLOWPLUG_DEBUG=1 shows where)\n"
    assert (plain.returncode, plain.stderr) == (1, line)
    assert debug.returncode == 1
    assert "Traceback" in debug.stderr
    assert debug.stderr.endswith(line)


def test_control_c_is_exit_130_without_a_traceback() -> None:
    """Wherever in a verb it strikes."""
    done = broken_verb("os.kill(os.getpid(), signal.SIGINT); signal.pause()")

    assert (done.returncode, done.stderr) == (128 + signal.SIGINT, "")


@pytest.mark.parametrize("verb", ["preflight", "load", "run", "status --state-dir"])
def test_an_empty_path_is_a_usage_error(verb: str) -> None:
    """It would mean the current directory."""
    done = shell(f"$AGENT {verb} ''")

    assert done.returncode == 2
    assert "an empty path names nothing" in done.stderr


def test_release_says_what_is_missing() -> None:
    """Usage and the reason go to stderr."""
    done = shell("$AGENT release")

    assert (done.returncode, done.stdout) == (2, "")
    assert "name what to release: --run UID, --all or --driver" in done.stderr


def test_a_child_of_the_agent_keeps_its_traceback() -> None:
    """Its stderr is a log, where the stack is what is needed."""
    done = shell("$AGENT sampler --fd 0")

    assert done.returncode == 1
    assert "Traceback" in done.stderr
