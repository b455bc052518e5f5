"""A rollout as ``[[rollout]]`` of ``fleet.toml`` says it, checked once into frozen objects."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields

from console.config_nodes import NAME, NAME_RULE
from console.rollout.gate_address import address_problem
from console.rollout.sizes import resolve, size_problem
from console.rollout.states import GateRule, Rules
from remote_agent.protocol.codec import Checked
from remote_agent.protocol.messages import STAGES, Tier

MEASURES = ("total", "first_output", *STAGES)
TIERS = tuple(tier.value for tier in Tier)
ORDERS = ("as_listed", "coldest_first")
LONGEST_S = 7 * 86400.0
RETRIES_MOST = 100
SAMPLES_MOST = 10_000
FACTOR_MOST = 1000.0


@dataclass(frozen=True)
class Hook(Checked):
    """A program of the operator's, run for one node: its arguments, no shell.

    ``dry_run``: it changes nothing where ``GLOWPLUG_ROLLOUT_DRY_RUN`` is 1, so a plan may try it.
    """

    argv: tuple[str, ...]
    timeout_s: float = 60.0
    dry_run: bool = False

    def value_problems(self) -> Iterator[str]:
        yield from _seconds("timeout_s", self.timeout_s)
        yield from _arguments("argv", self.argv)


@dataclass(frozen=True)
class Hooks(Checked):
    """What moves a node's traffic. ``before_shift`` runs before the warm-up, ``shift`` and ``after_shift`` once the
    gates have passed, ``on_abort`` for a node that was taken out of traffic and did not become ready."""

    before_shift: Hook | None = None
    shift: Hook | None = None
    after_shift: Hook | None = None
    on_abort: Hook | None = None

    def value_problems(self) -> Iterator[str]:
        moves = [name for name in ("before_shift", "shift") if getattr(self, name) is not None]
        if moves and self.on_abort is None:
            yield f"on_abort: is required beside {' and '.join(moves)}, to back out a node that does not become ready"

    @property
    def names(self) -> tuple[str, ...]:
        """The hooks that there are, in the order in which they run."""
        return tuple(one.name for one in fields(self) if getattr(self, one.name) is not None)


@dataclass(frozen=True)
class Gate(Checked):
    """One condition for a batch, looked at ``count`` times, ``interval_s`` apart.

    Exactly one of ``measure`` (with ``limit_s``, or ``factor`` of the node's own median), ``tier`` (reached, or a
    warmer one), ``command`` and ``http``, whose address may have the placeholders of `gate_address`. More than
    ``failure_limit`` failed samples fail it; ``consecutive_success`` in a row pass it. ``batches`` counts from 1; empty
    for all.
    """

    measure: str | None = None
    limit_s: float | None = None
    factor: float | None = None
    tier: str | None = None
    command: tuple[str, ...] | None = None
    http: str | None = None
    status: int = 200
    timeout_s: float = 10.0
    count: int = 1
    interval_s: float = 5.0
    failure_limit: int = 0
    consecutive_success: int | None = None
    batches: tuple[int, ...] = ()

    def value_problems(self) -> Iterator[str]:
        kinds = [name for name in ("measure", "tier", "command", "http") if getattr(self, name) is not None]
        if len(kinds) != 1:
            yield f"exactly one of measure, tier, command and http is needed, not {' and '.join(kinds) or 'none'}"
        yield from self._limit_problems()
        if self.tier is not None and self.tier not in TIERS:
            yield f"tier: {self.tier[:80]!r} is not one of: {', '.join(TIERS)}"
        if self.command is not None:
            yield from _arguments("command", self.command)
        if self.http is not None and (problem := address_problem(self.http)) is not None:
            yield f"http: {problem}"
        if not 100 <= self.status <= 599:
            yield f"status: {self.status} is not within 100..599"
        yield from _seconds("timeout_s", self.timeout_s)
        yield from _seconds("interval_s", self.interval_s)
        yield from self._count_problems()
        yield from _batch_numbers("batches", self.batches)

    def _limit_problems(self) -> Iterator[str]:
        limits = [name for name in ("limit_s", "factor") if getattr(self, name) is not None]
        if self.measure is None:
            yield from (f"{name}: is for a gate with measure" for name in limits)
            return
        if self.measure not in MEASURES:
            yield f"measure: {self.measure[:80]!r} is not one of: {', '.join(MEASURES)}"
        if len(limits) != 1:
            yield f"measure: needs limit_s or factor, {'not both' if limits else 'and has neither'}"
        if self.limit_s is not None:
            yield from _seconds("limit_s", self.limit_s)
        if self.factor is not None and not 0 < self.factor <= FACTOR_MOST:
            yield f"factor: {self.factor:g} is not above 0 and at most {FACTOR_MOST:g}"

    def _count_problems(self) -> Iterator[str]:
        if not 1 <= self.count <= SAMPLES_MOST:
            yield f"count: {self.count} is not within 1..{SAMPLES_MOST}"
        if not 0 <= self.failure_limit < max(1, self.count):
            yield f"failure_limit: {self.failure_limit} is not within 0..{max(1, self.count) - 1}, below count"
        if self.consecutive_success is not None and not 1 <= self.consecutive_success <= max(1, self.count):
            yield f"consecutive_success: {self.consecutive_success} is not within 1..{max(1, self.count)}, the count"

    @property
    def rule(self) -> GateRule:
        """How many samples decide it, whatever they measure."""
        return GateRule(self.count, self.interval_s, self.failure_limit, self.consecutive_success, self.batches)

    @property
    def shortest_s(self) -> float:
        """The time between its first sample and its last, if all pass."""
        return ((self.consecutive_success or self.count) - 1) * self.interval_s

    def __str__(self) -> str:
        if self.measure is not None:
            most = f"{self.factor:g}× the node's median" if self.factor is not None else f"{self.limit_s:g} s"
            what = f"{self.measure} at most {most}"
        elif self.tier is not None:
            what = f"tier {self.tier}"
        elif self.command is not None:
            what = f"command {' '.join(self.command)}"
        else:
            what = f"http {self.http} is {self.status}"
        times = f", {self.count} samples {self.interval_s:g} s apart" if self.count > 1 else ""
        row = f", passes after {self.consecutive_success} in a row" if self.consecutive_success is not None else ""
        may_fail = f", {self.failure_limit} may fail" if self.failure_limit else ""
        return f"{what}{times}{row}{may_fail}"


@dataclass(frozen=True)
class Rollout(Checked):
    """A whole ``[[rollout]]``: which nodes get which recipe, how many at a time, and what stops it.

    ``selector`` names nodes as every verb does. ``order``: ``as_listed``, ``coldest_first``, or ``tag:NAME``, one or
    several, whose nodes come first. ``pause_after``: batches counted from 1.
    """

    name: str
    selector: str | tuple[str, ...]
    recipe: str
    serial: tuple[int | str, ...] = ("100%",)
    canary: int | str | None = None
    order: str | tuple[str, ...] = "as_listed"
    max_unavailable: int | str = 1
    max_failures: int | str = 1
    progress_deadline_s: float = 1800.0
    node_timeout_s: float = 900.0
    retries: int = 0
    backoff_s: float = 10.0
    pause_after: tuple[int, ...] = ()
    gates: tuple[Gate, ...] = ()
    hooks: Hooks = field(default_factory=Hooks)

    def value_problems(self) -> Iterator[str]:
        yield from _each_size("canary", () if self.canary is None else self.canary)
        yield from _each_size("max_unavailable", self.max_unavailable)
        yield from _each_size("max_failures", self.max_failures)
        yield from _each_size("serial", self.serial)
        if not self.serial:
            yield "serial: name at least one size"
        yield from self._order_problems()
        for name in ("progress_deadline_s", "node_timeout_s", "backoff_s"):
            yield from _seconds(name, getattr(self, name))
        if not 0 <= self.retries <= RETRIES_MOST:
            yield f"retries: {self.retries} is not within 0..{RETRIES_MOST}"
        yield from _batch_numbers("pause_after", self.pause_after)
        if not NAME.fullmatch(self.name):
            yield f"name: {self.name[:80]!r} {NAME_RULE}"
        if not self.selectors or not all(self.selectors):
            yield "selector: name at least one node, tag:NAME, or all"

    def _order_problems(self) -> Iterator[str]:
        if self.order in ORDERS:
            return
        tags = (self.order,) if isinstance(self.order, str) else self.order
        if not tags:
            yield "order: name at least one tag"
        for tag in tags:
            if not (tag.startswith("tag:") and NAME.fullmatch(tag[4:])):
                yield f"order: {tag[:80]!r} is not one of: {', '.join(ORDERS)}, tag:NAME"

    @property
    def selectors(self) -> tuple[str, ...]:
        return (self.selector,) if isinstance(self.selector, str) else self.selector

    @property
    def first_tags(self) -> tuple[str, ...]:
        """The tags whose nodes come first; none where ``order`` is another one."""
        order = (self.order,) if isinstance(self.order, str) else self.order
        return tuple(tag[4:] for tag in order if tag.startswith("tag:"))

    def rules(self, node_count: int) -> Rules:
        """Return what the machine goes by, where the selector names so many nodes."""
        return Rules(
            max_unavailable=resolve(self.max_unavailable, node_count),
            max_failures=resolve(self.max_failures, node_count),
            progress_deadline_s=self.progress_deadline_s,
            node_timeout_s=self.node_timeout_s,
            retries=self.retries,
            backoff_s=self.backoff_s,
            pause_after=self.pause_after,
            gates=tuple(gate.rule for gate in self.gates),
            hooks=self.hooks.names,
        )


def _seconds(name: str, value: float) -> Iterator[str]:
    if not 0 < value <= LONGEST_S:
        yield f"{name}: {value:g} s is not above 0 and at most {LONGEST_S:g}"


def _arguments(name: str, argv: tuple[str, ...]) -> Iterator[str]:
    if not argv:
        yield f"{name}: name at least one argument"
    for index, item in enumerate(argv):
        if not item or not item.isprintable():
            yield f"{name}[{index}]: {item[:80]!r} is empty or holds a control character"


def _each_size(name: str, sizes: int | str | tuple[int | str, ...]) -> Iterator[str]:
    listed = isinstance(sizes, tuple)
    for index, size in enumerate(sizes if isinstance(sizes, tuple) else (sizes,)):
        problem = size_problem(size)
        if problem is not None:
            yield f"{name}[{index}]: {problem}" if listed else f"{name}: {problem}"


def _batch_numbers(name: str, numbers: tuple[int, ...]) -> Iterator[str]:
    for index, number in enumerate(numbers):
        if number < 1:
            yield f"{name}[{index}]: {number} is no batch; they count from 1"
