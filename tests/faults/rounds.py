"""One round: a real console warms or rolls out, one process is killed or stopped at a drawn moment, and all is checked.

What is drawn from a seed: what is struck, how, after how many steps and hooks, and what the operator does then. Twenty
seeds in a row strike each kind of process in both ways, in a run and in a rollout.
"""

from __future__ import annotations

import random
import signal
import time
from dataclasses import dataclass, field

from console.errors import GlowplugError
from db import rollouts
from db.errors import NoHistoryError
from db.queries import History
from db.rollout_records import RolloutRecord
from db.rollout_store import lease_of
from tests.faults.checks import Checked, check_round, drained, named_as_out
from tests.faults.consoles import LEASE_S
from tests.faults.world import NODES, PATIENCE_S, RECIPE, World, send, until

TARGETS = ("sshd", "bridge", "agentd", "worker", "console")
VERBS = ("warm", "rollout")
WAYS = ("SIGKILL", "SIGSTOP")
MOST = {"warm": 21, "rollout": 33}
"""Steps and hooks of a warm-up of all nodes, and of a rollout where nothing fails."""

QUIET_S = 0.5
"""A rollout that is paused, and stays as it is for so long, waits for the operator."""


@dataclass(frozen=True)
class Plan:
    """``after``: how many steps and hooks must have been before; ``server``: sshd as a whole, not one connection.

    ``takes_over``: another console takes the rollout while its own is stopped.
    """

    seed: int
    verb: str
    target: str
    way: str
    after: int
    delay_s: float
    stop_s: float
    server: bool
    takes_over: bool
    retries: int

    def __str__(self) -> str:
        what = "sshd, all of it" if self.server else self.target
        stopped = f" for {self.stop_s:.2f} s" if self.way == "SIGSTOP" else ""
        other = ", another console takes over" if self.takes_over else ""
        return f"{self.verb}: {self.way} of {what}{stopped} {self.delay_s * 1000:.0f} ms after step {self.after}{other}"


@dataclass
class Report:
    """What became of a round. ``struck``: what was hit, and where it was; empty where it was gone already.

    ``looks``: at a rollout that nobody carried out.
    """

    plan: Plan
    struck: str = ""
    checked: Checked = field(default_factory=Checked)
    looks: int = 0
    problem: str = ""
    wall_s: float = 0.0


def plan_of(seed: int) -> Plan:
    """Return what a seed stands for, always the same."""
    kind = seed % (len(VERBS) * len(TARGETS) * len(WAYS))
    verb, way = VERBS[kind % 2], WAYS[kind // 2 % 2]
    target = TARGETS[kind // 4]
    draw = random.Random(f"faults {seed}")
    takes_over = (verb, target, way) == ("rollout", "console", "SIGSTOP") and draw.random() < 0.5
    return Plan(
        seed=seed,
        verb=verb,
        target=target,
        way=way,
        after=draw.randrange(MOST[verb]),
        delay_s=draw.uniform(0, 0.04),
        stop_s=draw.uniform(0.05, 1.2) + (2 * LEASE_S if takes_over else 0),
        server=target == "sshd" and draw.random() < 0.3,
        takes_over=takes_over,
        retries=draw.randrange(2),
    )


def play(world: World, plan: Plan) -> Report:
    """Play one round; what went wrong stands in the report."""
    report, began_s = Report(plan), time.monotonic()
    one = _Round(world, plan, report)
    try:
        one.play()
    except (AssertionError, GlowplugError, OSError) as error:
        report.problem = f"{type(error).__name__}: {error}"
        one.end()
    report.wall_s = time.monotonic() - began_s
    return report


class _Round:
    def __init__(self, world: World, plan: Plan, report: Report) -> None:
        self.world, self.plan, self.report = world, plan, report
        self.name = f"round-{plan.seed}"
        self.draw = random.Random(f"operator {plan.seed}")
        self.codes: dict[int, int] = {}
        self.pids: list[int] = []

    def play(self) -> None:
        plan, world = self.plan, self.world
        world.prepare(plan.seed, self.name, plan.retries)
        verb = ("warm", RECIPE, *NODES) if plan.verb == "warm" else ("rollout", "start", self.name)
        console = self.start(*verb)
        until(lambda: world.happened() >= plan.after or self.ended(console) is not None, f"step {plan.after}")
        time.sleep(plan.delay_s)
        consoles = self.strike(console)
        if plan.verb == "warm":
            for pid in consoles:
                self.wait(pid)
        else:
            self.operate(consoles)
        self.report.checked = check_round(world, self.name if plan.verb == "rollout" else None)
        self.judge(console)
        world.release()

    # --- consoles -------------------------------------------------------------------

    def start(self, *argv: str, output: str = "out") -> int:
        pid = self.world.console(*argv, output=output)
        self.pids.append(pid)
        return pid

    def end(self) -> None:
        """End the consoles of a round that went wrong."""
        for pid in self.pids:
            if self.ended(pid) is None:
                send(pid, signal.SIGKILL)
                self.wait(pid)

    def ended(self, pid: int) -> int | None:
        if pid not in self.codes:
            code = self.world.forker.ended(pid)
            if code is None:
                return None
            self.codes[pid] = code
        return self.codes[pid]

    def wait(self, pid: int) -> int:
        until(lambda: self.ended(pid) is not None, f"a console ends; it said: {self.world.said()[-2000:]}")
        return self.codes[pid]

    # --- the fault ------------------------------------------------------------------

    def strike(self, console: int) -> list[int]:
        """Do what is planned, and undo it where it can be; return the consoles that are at work."""
        plan, world = self.plan, self.world
        node = world.latest()
        if plan.server:
            self.report.struck = f"sshd at step {world.happened()}"
            world.sshd.stop()
            time.sleep(plan.stop_s)
            world.sshd.start()
            return [console]
        pid = console if plan.target == "console" else world.pid_of(plan.target, node)
        if pid is None or (plan.target == "console" and self.ended(console) is not None):
            return [console]
        steps = world.steps(node)
        where = f" of {node}, at {steps[-1][0] if steps else 'no step'}" if plan.target != "console" else ""
        if not send(pid, getattr(signal, plan.way)):
            return [console]
        self.report.struck = f"{plan.target}{where}, step {world.happened()}"
        consoles = [console]
        if plan.way == "SIGSTOP":
            late_s = time.monotonic() + plan.stop_s
            if plan.takes_over and self.record() is not None:
                time.sleep(1.2 * LEASE_S)
                consoles.append(self.start("rollout", "resume", self.name, output="other"))
            time.sleep(max(0.0, late_s - time.monotonic()))
            send(pid, signal.SIGCONT)
        return consoles

    # --- the operator -----------------------------------------------------------------

    def record(self) -> RolloutRecord | None:
        try:
            with History(self.world.history) as history:
                return rollouts.read(history, self.name)
        except NoHistoryError:
            return None

    def operate(self, consoles: list[int]) -> None:
        """Bring the rollout to its end as an operator does, who looks at its status first."""
        late_s = time.monotonic() + 2 * PATIENCE_S
        while True:
            assert time.monotonic() < late_s, f"it is never over: {self.report.checked}, {self.world.said()[-2000:]}"
            record = self.record()
            is_worked_on = any(self.ended(pid) is None for pid in consoles)
            if record is None or record.row.finished_ns is not None:
                if not is_worked_on:
                    break
            elif not is_worked_on:
                self.look(record)
                until(self.is_free, "its lease runs out")
                consoles.append(self.ask(record))
            elif record.row.phase == "paused" and time.time_ns() - record.row.updated_ns > QUIET_S * 1e9:
                consoles.append(self.ask(record))
            time.sleep(0.03)
        if record is None:
            assert not self.world.hooked(), "hooks ran for a rollout that was never stored"

    def is_free(self) -> bool:
        record = self.record()
        return record is None or lease_of(record.row, time.time_ns()) is None

    def look(self, record: RolloutRecord) -> None:
        """See that ``rollout status`` names each node that was drained and is not back in traffic."""
        self.report.looks += 1
        missing = drained(self.world)
        status = self.start("rollout", "status", self.name, "--json", output="status")
        assert self.wait(status) == 0, self.world.said("status")
        missing -= named_as_out(self.world.directory / "status")
        assert not missing, f"drained and not named as out of traffic: {missing}"

    def ask(self, record: RolloutRecord) -> int:
        failed = [row.node for row in record.nodes if row.state == "failed"]
        verbs: list[tuple[str, ...]] = [("resume", self.name), ("promote", self.name)]
        if failed:
            verbs = [("retry", self.name, failed[0]), ("promote", self.name), ("abort", self.name)]
        verb = self.draw.choice(verbs)
        return self.start("rollout", *verb, output=f"operator-{verb[0]}")

    # --- what it came to --------------------------------------------------------------

    def judge(self, console: int) -> None:
        """See that links and consoles cost no run, and that the verb says what the hosts say."""
        plan, checked = self.plan, self.report.checked
        if plan.target in ("sshd", "bridge", "console") or plan.way == "SIGSTOP":
            assert set(checked.ended) <= {"ready"}, f"a run did not become ready: {checked.ended}"
        if plan.verb != "warm":
            return
        code = self.codes[console]
        if plan.target == "console" and plan.way == "SIGKILL" and self.report.struck:
            assert code in (-signal.SIGKILL, 0)
            return
        wanted = 0 if checked.ended.get("ready", 0) == len(NODES) else 1
        if plan.server and set(checked.ended) <= {"ready"} and wanted:
            wanted = 3  # a node that refuses twice before its run was asked for is out of reach
        assert code == wanted, f"exit code {code}, runs {checked.ended}: {self.world.said()[-2000:]}"
