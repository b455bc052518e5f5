"""Consoles as processes, and one real node that several tests share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from console.demo import RECIPE, EmbeddedFleet

REPOSITORY = Path(__file__).parents[2]
PATIENCE_S = 90.0
SLOW = ("slow-1", "slow-2")
"""The demo's recipe with so many shapes to warm that something can happen meanwhile; no two share a standby."""


class Console:
    """``glowplug ARGV…`` as a process of its own, its progress readable while it works; or another ``program``."""

    def __init__(
        self,
        *argv: str,
        program: tuple[str, ...] = (sys.executable, "-m", "console"),
        directory: Path = REPOSITORY,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.lines: list[str] = []
        self._process = subprocess.Popen(
            [*program, *argv],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            cwd=directory,
            env=environ,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def until_said(self, words: str) -> str:
        """Return the first line of progress that holds ``words``; fail if the console ends without it."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            is_over = self._process.poll() is not None
            for line in tuple(self.lines):
                if words in line:
                    return line
            assert not is_over, f"it ended without saying {words!r}: {self.lines}"
            time.sleep(0.01)
        raise AssertionError(f"it never said {words!r}: {self.lines}")

    def end(self) -> tuple[int, str]:
        """Wait for the end; return exit code and stdout."""
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        out = self._process.stdout.read()
        code = self._process.wait(PATIENCE_S)
        self._reader.join()
        self._process.stdout.close()
        self._process.stderr.close()
        return code, out

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.lines.append(line.rstrip("\n"))


def document(*argv: str) -> tuple[int, dict[str, object]]:
    """Return exit code and document of a verb that ends by itself."""
    code, out = Console(*argv).end()
    content = json.loads(out)
    assert isinstance(content, dict)
    return code, content


def write_config(demo: EmbeddedFleet) -> Path:
    """Write the embedded fleet as a fleet.toml, as an operator would have written it, and return its path."""
    (node,) = demo.config.nodes
    recipe = demo.config.recipe(RECIPE)
    model = f"model = {{ path = {json.dumps(recipe.model.path)} }}\ndevices = ['cpu']\n"
    text = (
        f"[nodes.{node.name}]\nhost = '127.0.0.1'\nport = {node.port}\nuser = '{node.user}'\n"
        f"identity = {json.dumps(node.identity[0])}\nknown_hosts = {json.dumps(node.known_hosts[0])}\n"
        f"python = {json.dumps(list(node.python))}\nagent = {json.dumps(list(node.agent))}\n"
        f"state_directory = {json.dumps(node.state_directory)}\n"
        f"[recipes.{RECIPE}]\n{model}"
    )
    for name, first, step in zip(SLOW, (1536, 1537), (64, 8), strict=True):  # the second is not waited for
        shapes = ", ".join(f"{{ batch = 1, tokens = {tokens} }}" for tokens in range(first, 2046, step))
        text += f"[recipes.{name}]\n{model}request = {{ shapes = [{shapes}] }}\n"
    path = demo.directory / "fleet.toml"
    path.write_text(text, encoding="utf-8")
    return path


def soon(holds: Callable[[], object], what: str) -> None:
    """Wait until ``holds()``; fail with ``what``."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def processes_naming(text: str) -> list[int]:
    """Return the pids of processes with ``text`` in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if text.encode() in path.read_bytes() and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found
