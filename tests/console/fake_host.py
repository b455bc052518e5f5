"""A host that lives in the test: a journal, runs that the test moves on, and the link that carries it all.

The link does what `console.link.NodeLink` does with its sink: hello, replay from the
cursor, live events; values cross it as JSON, so nothing passes that the wire would refuse.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import replace

from console.config_nodes import Node
from console.errors import LinkLost, NodeUnreachable, RequestRefused
from console.session import Session
from console.state import LinkState, LinkStatus
from remote_agent.protocol.codec import decode, encode
from remote_agent.protocol.messages import (
    METHODS,
    Event,
    ParkParams,
    ParkResult,
    Probe,
    ReleaseParams,
    ReleaseResult,
    Resident,
    ResidentChanged,
    RunAccepted,
    RunFinished,
    RunRecord,
    RunResult,
    RunStarted,
    RunStartParams,
    RunStartResult,
    RunState,
    RunUidParams,
    StatusResult,
    Tier,
)
from remote_agent.protocol.peer import decode_event
from remote_agent.recipe import recipe_hash
from tests.console.happenings import event, hello, record, resident

MEANWHILE_S = 30.0


class FakeHost:
    """One agent: what it journalled survives its links."""

    def __init__(self, journal_uuid: str = "journal-1") -> None:
        self.hello = hello(journal_uuid=journal_uuid)
        self.journal: list[Event] = []
        self.runs: dict[str, RunRecord] = {}
        self.residents: list[Resident] = []
        self.links: list[FakeLink] = []
        self.asked: list[str] = []
        self.released: list[ReleaseParams] = []
        self.keeps_driver = False
        self.is_reachable = True
        self.is_refusing = False
        self.loses_answers = 0
        self.sends_events_first = False
        self.holds_replay_back = False

    def emit(self, data: object, run_uid: str | None) -> None:
        """Journal an event, then send it to whoever is connected."""
        one = event(len(self.journal) + 1, data, run_uid)
        self.journal.append(one)
        for link in self.links:
            link.deliver(one)

    def begin(self, run_uid: str) -> None:
        self.runs[run_uid] = replace(self.runs[run_uid], state=RunState.RUNNING)
        self.emit(RunStarted(), run_uid)

    def finish(self, run_uid: str, state: RunState = RunState.READY) -> None:
        """End a run and, when it is ready, keep its model warm."""
        base = self.runs[run_uid]
        over = replace(
            record(run_uid, state),
            recipe=base.recipe,
            recipe_hash=base.recipe_hash,
            tier_from=base.tier_from,
            accepted_wall_ns=base.accepted_wall_ns,
        )
        self.runs[run_uid] = over
        self.emit(RunFinished(over), run_uid)
        if state is RunState.READY:
            self.residents.append(resident(run_uid).resident)
            self.emit(resident(run_uid), run_uid)

    def answer(self, method: str, params: object) -> object:
        self.asked.append(method)
        if method == "probe":
            return Probe(self.hello.hostname, "6.1", 8, 100, 50, "absent")
        if method == "status":
            unfinished = tuple(run for run in self.runs.values() if not run.state.is_terminal)
            return StatusResult(unfinished, tuple(self.residents), {"agentd": 7})
        if isinstance(params, RunStartParams):
            return self._start(params)
        if isinstance(params, ReleaseParams):
            return self._release(params)
        if isinstance(params, ParkParams):
            return self._move(params, Tier.PARKED if method == "park" else Tier.STANDBY)
        assert isinstance(params, RunUidParams)
        if params.run_uid not in self.runs:
            raise RequestRefused("no_such_run", f"no run {params.run_uid}")
        if method == "run.cancel":
            self.finish(params.run_uid, RunState.CANCELLED)
        return RunResult(self.runs[params.run_uid])

    def _start(self, params: RunStartParams) -> RunStartResult:
        if self.is_refusing:
            raise RequestRefused("no_such_model", f"{params.recipe.model.path}: no such directory")
        if params.run_uid in self.runs:
            return RunStartResult(self.runs[params.run_uid], created=False)
        base = record(params.run_uid, RunState.QUEUED, None)
        digest = recipe_hash(params.recipe)
        accepted = RunAccepted(params.recipe, digest, params.actor, Tier.COLD, ("cpu",))
        self.runs[params.run_uid] = replace(
            base,
            recipe=params.recipe.name,
            recipe_hash=digest,
            actor=params.actor,
            accepted_wall_ns=event(len(self.journal) + 1, accepted).t_wall_ns,
        )
        self.emit(accepted, params.run_uid)
        return RunStartResult(self.runs[params.run_uid], created=True)

    def _move(self, params: ParkParams, tier: Tier) -> ParkResult:
        moved = [replace(one, tier=tier) for one in self.residents if one.run_uid == params.run_uid]
        self.residents = [one for one in self.residents if one.run_uid != params.run_uid] + moved
        for one in moved:
            self.emit(ResidentChanged(one, "held"), one.run_uid)
        return ParkResult(tuple(moved))

    def _release(self, params: ReleaseParams) -> ReleaseResult:
        self.released.append(params)
        gone = [one for one in self.residents if params.everything or one.run_uid == params.run_uid]
        if any(one.attached for one in gone) and not params.force:
            raise RequestRefused("attached", "somebody is attached")
        self.residents = [one for one in self.residents if one not in gone]
        for one in gone:
            self.emit(ResidentChanged(one, "gone", "released"), one.run_uid)
        if params.driver and self.residents:
            raise RequestRefused("residents_held", "the keeper holds residents")
        return ReleaseResult(tuple(gone), driver_released=params.driver and not self.keeps_driver)


class FakeLink:
    """The link to a `FakeHost`. The test connects and loses it."""

    def __init__(self, node: Node, host: FakeHost, cursor: Callable[[str], int], sink: Session) -> None:
        self.node = node
        self.host = host
        self.acked: list[tuple[str, int]] = []
        self.retries = 0
        self.patience_s = 0.0
        self._cursor = cursor
        self._sink = sink
        self.is_connected = False

    def start(self) -> None:
        if self.host.is_reachable:
            asyncio.get_running_loop().call_soon(self.connect)
        else:
            self._sink.link_changed(LinkState(LinkStatus.DISCONNECTED, 1.0, "connection refused", 2.0))

    async def stop(self) -> None:
        if self.is_connected:
            self.lose("stopped")

    def connect(self) -> None:
        self.host.links.append(self)
        self.is_connected = True
        self._sink.link_changed(LinkState(LinkStatus.CONNECTING, 1.0))
        self._sink.hello(self.host.hello)
        if not self.host.holds_replay_back:
            self.replay()
        self._sink.link_changed(LinkState(LinkStatus.CONNECTED, 2.0))

    def replay(self) -> None:
        for one in self.host.journal[self._cursor(self.host.hello.journal_uuid) :]:
            self.deliver(one)

    def lose(self, reason: str = "connection lost", final: bool = False, failures: int = 0) -> None:
        if self.is_connected:
            self.host.links.remove(self)
        self.is_connected = False
        retry_at_s = None if final else 4.0
        self._sink.link_changed(LinkState(LinkStatus.DISCONNECTED, 3.0, reason, retry_at_s, final, failures))

    def deliver(self, one: Event) -> None:
        text = json.dumps(encode(one))
        self._sink.event(
            self.host.hello.journal_uuid, decode_event(decode(Event, json.loads(text))), json.dumps(encode(one.data))
        )

    async def request(self, method: str, params: object, timeout_s: float = 10.0) -> object:
        if not self.is_connected:
            raise NodeUnreachable(f"{self.node.name}: connection lost")
        crossed = decode(METHODS[method].params, json.loads(json.dumps(encode(params))))
        if method == "resident.release":
            self.patience_s = timeout_s
        is_lost = method == "run.start" and self.host.loses_answers > 0
        if is_lost and not self.host.sends_events_first:
            self.lose("lost before the answer")
        result = self.host.answer(method, crossed)
        await asyncio.sleep(0)
        if is_lost:
            self.host.loses_answers -= 1
            if self.is_connected:
                self.lose("lost before the answer")
            raise LinkLost(f"{self.node.name}: lost before the answer")
        return decode(METHODS[method].result, json.loads(json.dumps(encode(result))))

    def ack(self, journal_uuid: str, seq: int) -> None:
        self.acked.append((journal_uuid, seq))

    def retry_now(self) -> None:
        self.retries += 1


async def eventually(holds: Callable[[], object]) -> None:
    """Wait until ``holds()`` is true; fail after half a minute."""
    deadline = time.monotonic() + MEANWHILE_S
    while not holds():
        assert time.monotonic() < deadline, "it never came true"
        await asyncio.sleep(0.005)
