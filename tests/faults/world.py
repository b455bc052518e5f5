"""Three hosts behind one real sshd, an operator's folder, and what can be struck: sshd, bridges, agents, workers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from remote_agent.agentd.daemon import holder
from remote_agent.agentd.paths import StateDir
from remote_agent.client import connect_running, open_client
from remote_agent.protocol.messages import ReleaseParams, ReleaseResult
from tests.console.sshd import Sshd
from tests.faults import host
from tests.faults.consoles import Forker
from tests.leftovers import MARK

REPOSITORY = Path(__file__).parents[2]
NODES = ("gpu-1", "gpu-2", "gpu-3")
RECIPE = "tiny"
PATIENCE_S = 90.0
HOOK_S = 0.03

_HOOK = """\
#!/bin/sh
say() {{ echo "$(date +%s%N) $1 $GLOWPLUG_ROLLOUT_PHASE $GLOWPLUG_ROLLOUT_NODE $GLOWPLUG_ROLLOUT_ATTEMPT" >> {log}; }}
say begun; sleep {seconds}; say done
"""


@dataclass(frozen=True)
class Hooked:
    """A line of the hooks' log: that one began, or came to its end."""

    t_wall_ns: int
    moment: str
    phase: str
    node: str
    attempt: int


class World:
    """Lives through many rounds: the agents' journals and the operator's history go on from one to the next."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.history, self.config = directory / "history.db", directory / "fleet.toml"
        self.hooks, self.log = directory / "hooks", directory / "glowplug.log"
        environment = {"PYTHONPATH": str(REPOSITORY), MARK: os.environ.get(MARK, "faults")}
        self.sshd = Sshd(directory / "sshd", options=("MaxStartups 100",), environment=environment)
        model = directory / "model.safetensors"
        model.write_bytes(b"weights")
        hook = directory / "hook"
        hook.write_text(_HOOK.format(log=self.hooks, seconds=HOOK_S))
        hook.chmod(0o755)
        for name in NODES:
            (self.orders(name) / "dev").mkdir(parents=True)
        self.seen_seq = dict.fromkeys(NODES, 0)
        self.sshd.start()
        self.forker = Forker()

    def close(self) -> None:
        """End agents as their user would, then the rest."""
        self.forker.close()
        for name in NODES:
            stop = [sys.executable, "-m", "remote_agent", "stop", "--force", "--keeper"]
            if self.state(name).run.exists():
                subprocess.run(
                    [*stop, "--state-dir", str(self.state(name).root)],
                    cwd=REPOSITORY, check=True, timeout=60, stdout=subprocess.DEVNULL,
                )  # fmt: skip
        self.sshd.stop()

    # --- where things are -------------------------------------------------------

    def orders(self, node: str) -> Path:
        return self.directory / node / "orders"

    def state(self, node: str) -> StateDir:
        return StateDir(self.directory / node / "state")

    def prepare(self, number: int, rollout: str, retries: int) -> None:
        """Begin a round: a recipe that nothing warm fits, a rollout of that name, empty logs."""
        self.hooks.unlink(missing_ok=True)
        for name in NODES:
            (self.orders(name) / "steps").unlink(missing_ok=True)
        nodes = "".join(self._node_table(name) for name in NODES)
        words = " ".join(f"linger:{step}" for step in host.STEPS)
        hook = f"{{ argv = [{json.dumps(str(self.directory / 'hook'))}] }}"
        self.config.write_text(
            f"{nodes}[recipes.{RECIPE}]\nmodel = {{ path = {json.dumps(str(self.directory / 'model.safetensors'))} }}\n"
            f"devices = ['cpu']\nenvironment = {{ STUB = '{words}' }}\nrequest = {{ prompt_tokens = {number + 1} }}\n"
            f"[[rollout]]\nname = '{rollout}'\nselector = 'all'\nrecipe = '{RECIPE}'\ncanary = 1\n"
            f"max_unavailable = 2\nmax_failures = 3\nretries = {retries}\nbackoff_s = 0.2\n"
            "gates = [{ tier = 'standby' }]\n"
            f"[rollout.hooks]\nbefore_shift = {hook}\nshift = {hook}\non_abort = {hook}\n"
        )

    def _node_table(self, name: str) -> str:
        server = self.sshd
        return (
            f"[nodes.{name}]\nhost = '127.0.0.1'\nport = {server.port}\nconnect_timeout_s = 60\n"
            f"identity = {json.dumps(str(server.user_key))}\nknown_hosts = {json.dumps(str(server.known_hosts))}\n"
            f"python = {json.dumps(sys.executable)}\nagent = {json.dumps([host.__file__, str(self.orders(name))])}\n"
            f"state_directory = {json.dumps(str(self.state(name).root))}\n"
        )

    def console(self, *argv: str, output: str = "out") -> int:
        """Start ``glowplug ARGV…`` and return its pid."""
        places = ("--config", self.config, "--history", self.history, "--log", self.log)
        return self.forker.start([*map(str, places), *argv], self.directory / output)

    def said(self, output: str = "out") -> str:
        return (self.directory / f"{output}.err").read_text(errors="replace")

    # --- what has happened --------------------------------------------------------

    def steps(self, node: str) -> list[tuple[str, int]]:
        """Return the steps of workers on a node so far, each with the worker's pid."""
        path = self.orders(node) / "steps"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(name, int(pid)) for name, pid in (line.split() for line in lines)]

    def hooked(self) -> list[Hooked]:
        lines = self.hooks.read_text().splitlines() if self.hooks.exists() else []
        return [
            Hooked(int(t), moment, phase, node, int(attempt))
            for t, moment, phase, node, attempt in (line.split() for line in lines)
        ]

    def happened(self) -> int:
        """Return how many steps and hooks there were: what a moment is counted by."""
        return sum(len(self.steps(name)) for name in NODES) + len(self.hooked())

    def latest(self) -> str:
        """Return the node on which something happened last."""
        paths = {name: self.orders(name) / "steps" for name in NODES}
        return max(NODES, key=lambda name: paths[name].stat().st_mtime_ns if paths[name].exists() else 0)

    # --- what can be struck ---------------------------------------------------------

    def pid_of(self, target: str, node: str) -> int | None:
        """Return the pid of a node's process, None where there is none."""
        if target == "agentd":
            return holder(self.state(node))
        if target == "worker":
            return next((pid for _, pid in reversed(self.steps(node)) if is_running(pid)), None)
        bridge = next((pid for pid in self.sshd.descendants() if self._is_bridge(pid, node)), None)
        return bridge if target == "bridge" or bridge is None else parent_of(bridge)

    def _is_bridge(self, pid: int, node: str) -> bool:
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            return False
        return b"bridge" in words and os.fsencode(self.state(node).root) in words

    def release(self) -> None:
        """Let go of all that a round left warm."""
        for name in NODES:
            with open_client(self.state(name), "release", connect_running) as client:
                client.call("resident.release", ReleaseParams(everything=True), ReleaseResult)


def is_running(pid: int) -> bool:
    """Return whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def parent_of(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def send(pid: int, number: signal.Signals) -> bool:
    """Send a signal; False where nobody is there to get it."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def until(holds: Callable[[], object], what: str) -> None:
    """Wait until ``holds()``. Raises: AssertionError with ``what`` after a deadline."""
    late_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < late_s, f"not within {PATIENCE_S:g} s: {what}"
        time.sleep(0.01)
