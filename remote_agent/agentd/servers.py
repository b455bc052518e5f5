"""Processes that serve a warm model: each has it attached, listens where its recipe says, and has answered there once.

A recipe has one server on a node. It ends with its agent, by request, with what it serves, or by itself; each end is
told. Nothing evicts what it serves, for it has the keeper's lease.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from remote_agent.agentd.completion import Completion, NoCompletionError, ask_completion, ask_health, in_thread
from remote_agent.agentd.events import EventLog
from remote_agent.agentd.timeline import Figure, Figures
from remote_agent.agentd.workers import Order, SpawnError, Worker, Workers
from remote_agent.errors import StageError
from remote_agent.protocol.internal import InternalMessage, WorkerAttached, WorkerFailed, WorkerGo
from remote_agent.protocol.messages import Failure, Finding, Recipe, Serve, Server

LOOK_S = 0.05
"""Between two tries to reach a server that starts."""

LAST_WORD_S = 1.0
"""For a request that is under way when the time is up, to say what became of it: its own time is up as well."""

LAST_LINES = 8
"""Of its log, told when a server has ended by itself."""

STAGE = "listening"


@dataclass(eq=False)
class Serving:
    """One server. ``resident``: what the keeper calls what it serves. ``reason``: why it will be gone."""

    server: Server
    recipe: Recipe
    resident: str
    device: str
    worker: Worker
    reason: str | None = None


class Servers:
    """Every server of this node."""

    def __init__(self, events: EventLog, workers: Workers) -> None:
        self._events, self._workers = events, workers
        self._all: dict[Serving, None] = {}
        self._beginnings: dict[_Beginning, str] = {}
        self.on_change: Callable[[str], None] = lambda resident: None
        """Called with what the keeper calls it, when another one serves it or one no longer does."""

    def __iter__(self) -> Iterator[Server]:
        return iter([one.server for one in self._all])

    @property
    def serving(self) -> tuple[Serving, ...]:
        return tuple(self._all)

    @property
    def pids(self) -> dict[str, int]:
        return {f"server {one.recipe} {one.address}": one.pid for one in self}

    def of(self, resident: str | None) -> tuple[Server, ...]:
        """Return who serves what the keeper calls ``resident``."""
        return tuple(one.server for one in self._all if one.resident == resident)

    async def start(self, order: Order, go: WorkerGo) -> Figures:
        """Have a process serve an order's recipe, and return what to say of that once it has answered.

        The recipe's server of before is stopped at first: nobody listens from then on until the new one does.
        Raises: StageError; then no process is left of it
        """
        if go.resident is None:
            text = "the keeper has not got the model's weights, so that no process can attach to them"
            raise StageError(Failure("not_attachable", text, STAGE))
        begun = time.monotonic_ns()
        replaced = await self.stop(order.recipe.name, f"replaced by run {order.run_uid}")
        figures: dict[str, Figure] = {"replace_ns": time.monotonic_ns() - begun} if replaced else {}
        try:
            worker = await self._workers.start_attached(order, go, serves=True)
        except SpawnError as error:
            raise StageError(Failure("server_not_started", str(error), STAGE)) from error
        beginning = _Beginning(order.recipe, worker)
        self._beginnings[beginning] = go.resident
        try:
            answer = await beginning.until_answered()
        except BaseException:
            await worker.end()
            raise
        finally:
            del self._beginnings[beginning]
        self._add(order, go, worker)
        figures.update(beginning.figures)
        figures["first_answer_ns"], figures["answer"] = answer.total_ns, answer.output[:400]
        reason = f"in place of process {replaced[0].pid}" if replaced else None
        assert order.recipe.serve is not None
        return Figures(path=order.recipe.serve.address, reason=reason, extra={**figures, "pid": worker.child.pid})

    async def stop(self, recipe: str | None, reason: str) -> tuple[Server, ...]:
        """Stop a recipe's server, or all of them (None); return those that have ended."""
        return await self._stop([one for one in self._all if recipe in (None, one.recipe.name)], reason)

    async def stop_of(self, residents: Iterable[str | None], reason: str) -> tuple[Server, ...]:
        """Stop what serves any of ``residents``, by the keeper's names, and what starts to."""
        names = set(residents)
        for beginning, name in self._beginnings.items():
            if name in names:
                beginning.call_off(reason)
        return await self._stop([one for one in self._all if one.resident in names], reason)

    async def stop_device(self, device: str, reason: str) -> None:
        """Stop what serves from a device."""
        await self._stop([one for one in self._all if one.device == device], reason)

    async def _stop(self, chosen: list[Serving], reason: str) -> tuple[Server, ...]:
        for one in chosen:
            one.reason = one.reason or reason
        stuck = await asyncio.gather(*(one.worker.release() for one in chosen))
        for one, why in zip(chosen, stuck, strict=True):
            if why:
                self._events.emit(
                    Finding("server_stuck", "error", f"{describe(one.server)}: {why}"), one.server.run_uid
                )
        await asyncio.sleep(0)  # let what waits for the end of a worker hear of it
        return tuple(one.server for one in chosen if one not in self._all)

    def _add(self, order: Order, go: WorkerGo, worker: Worker) -> None:
        serve = order.recipe.serve
        assert serve is not None
        assert go.resident is not None
        server = Server(
            order.recipe.name, order.run_uid, serve.entry, serve.host, serve.port, worker.child.pid, time.time_ns()
        )
        one = Serving(server, order.recipe, go.resident, order.device, worker)
        self._all[one] = None
        worker.on_message = lambda _, message: self._heard(one, message)
        worker.gone.add_done_callback(lambda gone: self._gone(one, gone.result()))
        self.on_change(go.resident)

    def _heard(self, one: Serving, message: InternalMessage) -> None:
        if isinstance(message, WorkerFailed):
            one.reason = one.reason or message.failure.detail

    def _gone(self, one: Serving, how: str) -> None:
        del self._all[one]
        if one.worker.was_released:
            finding = Finding("server_stopped", "info", f"{describe(one.server)} has stopped: {one.reason}")
        else:
            last = " | ".join(one.worker.log_tail()[-LAST_LINES:])
            text = f"{describe(one.server)} died: {one.reason or how}" + (f"; its last lines: {last}" if last else "")
            finding = Finding("server_died", "error", text[:2000])
        self._events.emit(finding, one.server.run_uid)
        self.on_change(one.resident)


class _Beginning:
    """A server from its process's start to its first completion. ``figures``: what to say of that."""

    def __init__(self, recipe: Recipe, worker: Worker) -> None:
        assert recipe.serve is not None
        self._recipe, self._serve, self._worker = recipe, recipe.serve, worker
        self._begun = time.monotonic()
        self._attached: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._failed: asyncio.Future[StageError] = asyncio.get_running_loop().create_future()
        self._last = "its process did not get so far as to call the entry point"
        self._tries = 0
        self.figures: dict[str, Figure] = {}
        worker.on_message = self._heard
        worker.gone.add_done_callback(lambda gone: self._fail(Failure("server_died", f"the server {gone.result()}")))

    async def until_answered(self) -> Completion:
        """Return the first completion. Raises: StageError if there is none in time, or its process has ended"""
        work = asyncio.ensure_future(self._ask())
        awaited: set[asyncio.Future[Any]] = {work, self._failed}
        try:
            await asyncio.wait(awaited, timeout=self._left_s(), return_when=asyncio.FIRST_COMPLETED)
            if self._attached.done():
                await asyncio.wait(awaited, timeout=LAST_WORD_S, return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done():
                raise self._failed.result()
            if work.done():
                return work.result()
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
        raise self._late()

    def call_off(self, reason: str) -> None:
        """Have it come to nothing."""
        self._fail(Failure("server_stopped", f"the server was stopped while it started: {reason}"))

    async def _ask(self) -> Completion:
        await self._attached
        if self._serve.health is not None:
            self._tries = 0
            await self._repeat(ask_health, self._serve)
            self.figures["health_ns"] = round((time.monotonic() - self._begun) * 1e9)
        self._tries = 0
        found: Completion = await self._repeat(ask_completion, self._recipe)
        self.figures["tries"] = self._tries
        return found

    async def _repeat(self, ask: Callable[[Any, float], Any], what: Recipe | Serve) -> Any:
        """Return the first answer; what a server that starts may say is asked again."""
        while (left_s := self._left_s()) > 0:
            self._tries += 1
            try:
                return await in_thread(ask, what, left_s)
            except NoCompletionError as error:
                if not error.may_come:
                    raise self._error(Failure("no_completion", str(error))) from error
                self._last = str(error)
            await asyncio.sleep(LOOK_S)
        raise self._late()

    def _left_s(self) -> float:
        return self._begun + self._serve.ready_timeout_s - time.monotonic()

    def _late(self) -> StageError:
        serve = self._serve
        text = f"no completion from {serve.address}{serve.request.path} within {serve.ready_timeout_s:g} s"
        return self._error(Failure("not_ready_in_time", f"{text}: {self._last}, after {self._tries} tries"))

    def _heard(self, worker: Worker, message: InternalMessage) -> None:
        if isinstance(message, WorkerFailed):
            self._fail(message.failure)
        elif isinstance(message, WorkerAttached) and not self._attached.done():
            self.figures.update(message.steps)
            self._attached.set_result(None)

    def _fail(self, failure: Failure) -> None:
        if not self._failed.done():
            self._failed.set_result(self._error(failure))

    def _error(self, failure: Failure) -> StageError:
        return StageError(replace(failure, stage=STAGE, log_tail=self._worker.log_tail()))


def describe(server: Server) -> str:
    """Return who it is, in the words of every finding."""
    return f"the server of {server.recipe} on {server.address} (process {server.pid})"
