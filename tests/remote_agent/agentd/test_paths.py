"""What is told of a log's end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from remote_agent.agentd.commands import Commands
from remote_agent.agentd.paths import TAIL_LINE_CHARACTERS, tail


def test_a_crash_is_told_by_its_stack(tmp_path: Path) -> None:
    """Python's list of extension modules, kilobytes long, does not push the stack out."""
    log = tmp_path / "log"
    with log.open("wb") as file:
        script = (
            "import faulthandler, signal, os\nfaulthandler.enable()\n"
            "def deep(left): return deep(left - 1) if left else os.kill(os.getpid(), signal.SIGSEGV)\ndeep(40)"
        )
        subprocess.run([sys.executable, "-c", script], stderr=file, check=False)
        file.write(b"Extension modules: " + b"numpy, " * 2000 + b"(total: 182)\n")

    told = tail(log)

    assert told[0].startswith("Fatal Python error")
    assert "in deep" in told[2]
    assert len(told) == 20
    assert not any("Extension modules" in line for line in told)


def test_a_crash_is_told_by_the_stack_of_the_thread_that_crashed(tmp_path: Path) -> None:
    """Python writes the stacks of all threads, the newest first; a crash of the oldest comes last."""
    log = tmp_path / "log"
    with log.open("wb") as file:
        script = (
            "import faulthandler, signal, os, threading\nfaulthandler.enable()\n"
            "def waits(left, ready):\n"
            "    return waits(left - 1, ready) if left else (ready.set(), threading.Event().wait())\n"
            "for _ in range(3):\n"
            "    ready = threading.Event()\n"
            "    threading.Thread(target=waits, args=(30, ready), daemon=True).start()\n"
            "    ready.wait()\n"
            "def crashing(): os.kill(os.getpid(), signal.SIGSEGV)\ncrashing()"
        )
        subprocess.run([sys.executable, "-c", script], stderr=file, check=False)

    told = tail(log)

    assert told[0].startswith("Fatal Python error")
    assert "in crashing" in told[2]
    assert not any("in waits" in line for line in told)


def test_long_lines_and_control_characters_are_cut(tmp_path: Path) -> None:
    """A line is bounded, and nothing of it can move a terminal's cursor."""
    (tmp_path / "log").write_text("a" * 2000 + "\n\x1b[2Jlast\n")

    assert tail(tmp_path / "log") == ["a" * TAIL_LINE_CHARACTERS, " [2Jlast"]
    assert tail(tmp_path / "absent") == []


def test_a_python_is_looked_up_once_and_started_by_its_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bare name in PATH, `~/` at home; a link stays a link, and what is not there is named as it was given."""
    program = tmp_path / "snake"
    program.symlink_to(sys.executable)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    commands = Commands()

    assert commands.talking("worker", ("absent-snake",))[0] == "absent-snake"
    assert commands.talking("worker", ("snake", "-X", "dev"))[:3] == (str(program), "-X", "dev")
    assert commands.talking("worker", ("~/snake",))[0] == str(program)
    monkeypatch.setenv("PATH", "/nowhere")
    assert commands.talking("worker", ("snake",))[0] == str(program)


def test_preflight_starts_without_site() -> None:
    """It needs the standard library alone, also on the Python of an environment full of packages."""
    argv = Commands().talking("preflight-child")

    assert argv[:2] == (sys.executable, "-S")
    assert "-S" not in Commands().talking("preflight-child", ("/opt/python",))
    assert "-S" not in Commands().talking("sampler")
