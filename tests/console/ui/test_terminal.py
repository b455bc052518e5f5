"""The real thing in a real terminal: keys in, a screen out, a model warmed, nothing left running."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.needs import need

REPOSITORY = Path(__file__).parents[3]
DEADLINE_S = 100.0
POLL_S = 0.1

pytestmark = pytest.mark.timeout(300)


class Terminal:
    """A tmux session of 120 by 40 with its own server, so that no other tmux is touched."""

    def __init__(self, directory: Path) -> None:
        self._socket = directory / "tmux"
        self._raw = directory / "raw"

    def start(self, command: str) -> None:
        environ = {**os.environ, "TERM": "screen-256color", "TMUX": ""}
        self._tmux("new-session", "-d", "-x", "120", "-y", "40", command, env=environ)
        self._tmux("set-option", "-g", "remain-on-exit", "on")

    def press(self, *keys: str) -> None:
        self._tmux("send-keys", *keys)

    def screen(self) -> str:
        return self._tmux("capture-pane", "-p")

    def wait_for(self, *words: str) -> str:
        """Return the screen once it shows all of ``words``; fail with what it shows instead."""
        return self.wait_until(lambda screen: all(word in screen for word in words), " and ".join(words))

    def wait_until(self, condition: Callable[[str], bool], what: str) -> str:
        until = time.monotonic() + DEADLINE_S
        while not condition(screen := self.screen()):
            assert time.monotonic() < until, f"no {what} in {DEADLINE_S:.0f} s:\n{screen}"
            time.sleep(POLL_S)
        return screen

    def close(self) -> None:
        subprocess.run(["tmux", "-S", str(self._socket), "kill-server"], check=False, capture_output=True)

    def _tmux(self, *arguments: str, env: dict[str, str] | None = None) -> str:
        command = ["tmux", "-S", str(self._socket), "-f", "/dev/null", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, env=env, timeout=20).stdout


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    need("tmux", "tmux")
    terminal = Terminal(tmp_path)
    yield terminal
    terminal.close()


def processes_that_mention(path: Path) -> list[str]:
    """Return the command line of every process, not tmux, whose arguments or environment name ``path``."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            command, environ = (entry / "cmdline").read_bytes(), (entry / "environ").read_bytes()
        except OSError:
            continue
        if str(path).encode() in command + environ and not command.startswith(b"tmux"):
            found.append(command.replace(b"\0", b" ").decode(errors="replace"))
    return found


def test_a_model_is_warmed_by_keys_in_a_terminal_and_nothing_is_left_running(
    terminal: Terminal, tmp_path: Path
) -> None:
    """Open, choose, confirm, watch it become ready, look at the run, leave."""
    directory = tmp_path / "demo"
    program = [
        sys.executable,
        "-m",
        "console",
        "demo",
        "--nodes",
        "2",
        "--device",
        "cpu",
        "--directory",
        str(directory),
    ]
    terminal.start(f"cd {shlex.quote(str(REPOSITORY))} && {shlex.join(program)}; echo left with $?; exec cat")

    terminal.wait_for("demo-1", "demo-2", "2 cold")
    terminal.press("w")
    terminal.wait_for("[x] demo-1", "[ ] demo-2", "Warm 1 node")
    terminal.press("Enter")
    dialog = terminal.wait_for("Warm demo on 1 node", "Go back")
    assert "demo-2" not in dialog.split("Warm demo on 1 node")[1].split("Go back")[0]
    terminal.press("y")

    terminal.wait_for("1 warming")
    fleet = terminal.wait_for("1 ready", "1 cold", "✔ ready", "standby")
    assert "answered" in fleet
    terminal.press("Enter")
    run = terminal.wait_for("first_request", "unattributed", "Events")
    assert "✔ ready" in run
    terminal.press("Escape")
    terminal.wait_for("1 ready", "1 cold")
    terminal.press("h")
    terminal.wait_for("1 of 1 runs", "✔ ready")

    there = processes_that_mention(directory)
    assert any("agentd" in command for command in there), there
    terminal.press("C-q")
    terminal.wait_for("left with 0")
    assert processes_that_mention(directory) == []
