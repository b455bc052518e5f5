"""One node of the fleet: what its link says goes to its state and to the history. Everything runs on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Protocol, TypeVar

from console.config_nodes import Node
from console.errors import GlowplugError, LinkError, NodeUnreachable, RequestRefused
from console.recorder import Recorder
from console.reduce import reduce
from console.state import (
    BaselineKey,
    BaselineLoaded,
    Change,
    EventReceived,
    GapReceived,
    HelloReceived,
    LinkChanged,
    LinkState,
    LinkStatus,
    LocalFinding,
    NodeState,
    ProbeReceived,
    RunReceived,
    RunView,
    SampleReceived,
    StageBaseline,
    StatusReceived,
)
from remote_agent.protocol.messages import (
    Empty,
    Event,
    Finding,
    Gap,
    HelloResult,
    Probe,
    RunAccepted,
    RunFinished,
    RunRecord,
    RunResult,
    RunUidParams,
    Sample,
    StageChanged,
    StatusResult,
    Tier,
)

T = TypeVar("T")
log = logging.getLogger(__name__)

TIERS_FOLLOWED = (Tier.COLD, Tier.CACHED, Tier.HOST, Tier.RESIDENT, Tier.ARMED, Tier.PARKED, Tier.STANDBY)
"""Tiers that a run may start from today; history is asked about each."""

ENOUGH_FAILURES = 2
"""A server that is just being restarted refuses one try, hardly the next."""

LAST_WORD_S = 2.0
"""For a login to say what became of it: its limit is as long as a verb's, and begins a little later."""

Baselines = Callable[[str, BaselineKey], Awaitable[StageBaseline | None]]
"""``(node, key)``: what history says, None where it has nothing."""


class Link(Protocol):
    """What a session needs of its link; `console.link.NodeLink` is one."""

    def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def request(self, method: str, params: object, timeout_s: float = 10.0) -> object:
        """Return the typed result. Raises: LinkError, RequestRefused."""

    def ack(self, journal_uuid: str, seq: int) -> None: ...

    def retry_now(self) -> None: ...


class Session:
    """Keeps one node's state and link; is the link's sink.

    ``on_change`` is called with the node's name after every change of its state.
    """

    def __init__(
        self,
        node: Node,
        recorder: Recorder,
        baselines: Baselines,
        recipe_hashes: tuple[str, ...],
        on_change: Callable[[str], None],
    ) -> None:
        self.node = node
        self.state = NodeState(node.name, tags=node.tags, recipes=node.recipes)
        self.link: Link | None = None
        self.said: list[str] = []
        self._recorder = recorder
        self._baselines = baselines
        self._recipe_hashes = recipe_hashes
        self._on_change = on_change
        self._watchers: list[Callable[[NodeState], None]] = []
        self._awaited: dict[str, int] = {}
        self._lost: dict[str, RequestRefused] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self._finished_at: dict[BaselineKey, int] = {}

    # --- what the link says -------------------------------------------------

    def link_changed(self, link: LinkState) -> None:
        was_known = self.state.is_known
        self.apply(LinkChanged(link))
        if self.state.is_known and not was_known:
            self.spawn(self.refresh())

    def hello(self, hello: HelloResult) -> None:
        self.apply(HelloReceived(hello, time.monotonic_ns()))
        self._recorder.follow(hello.journal_uuid, self._durable)

    def event(self, journal_uuid: str, event: Event, raw_json: str) -> None:
        is_new = journal_uuid != self.state.journal_uuid or event.seq > self.state.seq
        self.apply(EventReceived(event, time.monotonic_ns()))
        run = self.state.runs.get(event.run_uid) if event.run_uid else None
        self._recorder.event(self.node.name, journal_uuid, event, raw_json, run)
        if is_new:
            self._follow_baselines(event, run)

    def sample(self, sample: Sample) -> None:
        self.apply(SampleReceived(sample, time.monotonic_ns()))
        self._recorder.sample(self.node.name, sample, self.state.run)

    def gap(self, journal_uuid: str, gap: Gap) -> None:
        self.apply(GapReceived(gap))
        self._recorder.gap(self.node.name, journal_uuid, gap)

    async def ready(self) -> None:
        """Wait while the history can't keep up; the link reads no further meanwhile."""
        await self._recorder.ready()

    # --- what the console asks ----------------------------------------------

    async def request(self, method: str, params: object, result: type[T], timeout_s: float = 10.0) -> T:
        """Return the node's answer. Raises: LinkError, RequestRefused."""
        assert self.link is not None
        answer = await self.link.request(method, params, timeout_s)
        if not isinstance(answer, result):
            raise LinkError(f"{self.node.name}: the answer to {method} is of another kind")
        return answer

    async def probe(self) -> Probe:
        probe = await self.request("probe", Empty(), Probe)
        self.apply(ProbeReceived(probe))
        return probe

    async def status(self) -> StatusResult:
        """Return what is on the node now, and bring the state up to it."""
        status = await self.request("status", Empty(), StatusResult)
        self.apply(StatusReceived(status))
        return status

    def found(self, run: RunRecord) -> None:
        """Take in what the node has just said about a run."""
        self.apply(RunReceived(run))

    def recall(self, run: RunRecord, baseline: StageBaseline | None) -> None:
        """Take in a run that is over from the history, with the medians of those before it; a newer one is shown."""
        self.apply(RunReceived(run, baseline))

    async def refresh(self) -> None:
        """Ask the node what it is and what it does; what it does not answer is said in its log."""
        try:
            status = await self.status()
            await self._find_missing(frozenset(run.run_uid for run in status.runs))
            await self.probe()
        except LinkError as error:
            log.debug("%s: not refreshed: %s", self.node.name, error)
        except GlowplugError as error:
            self.say("error", f"the node could not be asked for its status: {error}")
        for recipe_hash in self._recipe_hashes:
            for tier in TIERS_FOLLOWED:
                for armed in (False, True):
                    await self._load_baseline((recipe_hash, tier, armed))

    async def until(self, wanted: Callable[[NodeState], T | None], timeout_s: float | None = None) -> T:
        """Return what ``wanted`` finds in the state, as soon as it finds something; no state is missed.

        Raises: TimeoutError; whatever ``wanted`` raises.
        """
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def watch(state: NodeState) -> None:
            if future.done():
                return
            try:
                found = wanted(state)
            except GlowplugError as error:
                future.set_exception(error)
            else:
                if found is not None:
                    future.set_result(found)

        self._watchers.append(watch)
        try:
            watch(self.state)
            async with asyncio.timeout(timeout_s):  # `wait_for` may lose a cancel that comes with the answer
                return await future
        finally:
            self._watchers.remove(watch)

    async def until_connected(self, timeout_s: float | None) -> None:
        """Wait until the node can be asked, but not through more tries than can help: two, or the next one.

        Without ``timeout_s`` it is waited for as long as any retry will be made.

        Raises: NodeUnreachable with the link's reason.
        """
        enough = max(self.state.link.failures + 1, ENOUGH_FAILURES)

        def connected(state: NodeState) -> bool | None:
            if state.link.final or (timeout_s is not None and state.link.failures >= enough):
                raise NodeUnreachable(self.describe_link())
            return True if state.is_known else None

        def told(state: NodeState) -> bool | None:
            return True if state.is_known or state.link.final or state.link.reason is not None else None

        try:
            await self.until(connected, timeout_s)
        except TimeoutError:
            with contextlib.suppress(TimeoutError):
                await self.until(told, LAST_WORD_S)
            if not self.state.is_known:
                raise NodeUnreachable(self.describe_link()) from None

    async def until_over(self, run_uid: str, timeout_s: float | None = None) -> RunView:
        """Return the run once it is over; a lost link is waited out.

        Raises: TimeoutError; NodeUnreachable once no retry will be made; RequestRefused if the node lost the run.
        """

        def over(state: NodeState) -> RunView | None:
            if run_uid in self._lost:
                raise self._lost[run_uid]
            run = state.runs.get(run_uid)
            if run is not None and run.state.is_terminal:
                return run
            if state.link.final:
                raise NodeUnreachable(self.describe_link())
            return None

        self._awaited[run_uid] = self._awaited.get(run_uid, 0) + 1
        self._lost.pop(run_uid, None)
        try:
            if run_uid not in self.state.runs and self.state.is_known:
                await self._find(run_uid)
            return await self.until(over, timeout_s)
        finally:
            self._awaited[run_uid] -= 1
            if not self._awaited[run_uid]:
                del self._awaited[run_uid]

    async def until_accepted(self, run_uid: str) -> RunView:
        """Return the run once its node knows it, or it is over. Raises: NodeUnreachable once no retry will be made."""

        def accepted(state: NodeState) -> RunView | None:
            run = state.runs.get(run_uid)
            if run is not None and (run.is_accepted or run.state.is_terminal):
                return run
            if state.link.final:
                raise NodeUnreachable(self.describe_link())
            return None

        return await self.until(accepted)

    def describe_link(self) -> str:
        """Return one line: the node, its link, and why."""
        link = self.state.link
        reason = link.reason or {LinkStatus.IDLE: "not asked yet"}.get(link.status, "no answer yet")
        return f"{self.node.name}: {link.status.value}: {reason}"

    def say(self, severity: str, text: str) -> None:
        """Put a line of the console's own into the node's log, and keep it in ``said``."""
        self.said.append(text)
        finding = Finding("console", "error" if severity == "error" else "warning", text)
        self.apply(LocalFinding(time.time_ns(), finding))

    def apply(self, change: Change) -> None:
        """Bring the state up to date and tell whoever waits for it."""
        before = self.state
        self.state = reduce(before, change)
        if self.state == before:
            return
        self._on_change(self.node.name)
        for watch in tuple(self._watchers):
            watch(self.state)

    def spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Run ``work`` beside everything else; `close` ends it."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def close(self) -> None:
        """End the link and all that was spawned; what the history stores later asks it nothing more."""
        self._is_closed = True
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        if self.link is not None:
            await self.link.stop()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- within -------------------------------------------------------------

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s: unexpected", self.node.name, exc_info=error)
            self.say("error", f"the console made a mistake about this node: {error}")

    def _durable(self, journal_uuid: str, seq: int) -> None:
        if self.link is not None:
            self.link.ack(journal_uuid, seq)
        if journal_uuid == self.state.journal_uuid:
            for key in [key for key, finished in self._finished_at.items() if finished <= seq]:
                del self._finished_at[key]
                self._refresh_baseline(key)

    async def _find_missing(self, listed: frozenset[str]) -> None:
        """Ask about runs that someone waits for, or that seemed unfinished, and that the node no longer lists."""
        unfinished = [run.run_uid for run in self.state.runs.values() if run.is_accepted and not run.state.is_terminal]
        unheard = [uid for uid in self._awaited if uid not in self.state.runs]
        for run_uid in {*unfinished, *unheard} - listed:
            await self._find(run_uid)

    async def _find(self, run_uid: str) -> None:
        try:
            answer = await self.request("run.get", RunUidParams(run_uid), RunResult)
        except RequestRefused as error:
            self._lose(run_uid, error)
            return
        self.found(answer.run)

    def _lose(self, run_uid: str, error: RequestRefused) -> None:
        """The node does not know a run that it had accepted: its end will never be told."""
        self._lost[run_uid] = error
        self.say("error", f"run {run_uid[:8]} is not known to the node any more: {error}")

    def _follow_baselines(self, event: Event, run: RunView | None) -> None:
        if isinstance(event.data, RunFinished):
            over = event.data.run
            self._finished_at[over.recipe_hash, over.tier_from, over.tier_to is Tier.ARMED] = event.seq
        corrected = isinstance(event.data, StageChanged) and "tier_from" in event.data.stage.extra
        if run is not None and (corrected or isinstance(event.data, RunAccepted)):
            self._refresh_baseline(run.baseline_key)

    def _refresh_baseline(self, key: BaselineKey) -> None:
        if not self._is_closed:
            self.spawn(self._load_baseline(key))

    async def _load_baseline(self, key: BaselineKey) -> None:
        baseline = await self._baselines(self.node.name, key)
        if baseline is not None:
            self.apply(BaselineLoaded(key, baseline))
