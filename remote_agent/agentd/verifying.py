"""Real requests to what is ready of a model: through its server's port, its standby, or a process attached for that.

A sample has the times of one request, or why there are none; nothing is estimated.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from remote_agent.agentd.completion import NoCompletionError, ask_completion, in_thread
from remote_agent.agentd.holders import Held
from remote_agent.agentd.keeping import KeeperLink
from remote_agent.agentd.paths import StateDir
from remote_agent.agentd.residents import VERIFYING, Residents, refuse_busy
from remote_agent.agentd.servers import Servers, Serving
from remote_agent.agentd.store import RunStore
from remote_agent.agentd.workers import LateAnswerError, NoAnswerError, Order, SpawnError, Worker, Workers
from remote_agent.errors import KeeperError, RefusedError, ResidentLostError
from remote_agent.protocol.internal import (
    InternalMessage,
    Manifest,
    WorkerAnswer,
    WorkerAsk,
    WorkerAttached,
    WorkerFailed,
    WorkerGo,
)
from remote_agent.protocol.messages import (
    FirstRequest,
    ModelSource,
    Recipe,
    Resident,
    Tier,
    VerifyParams,
    VerifyResult,
    VerifySample,
)

ATTACH_S = 120.0
"""How long a process may take to attach; its imports may have to come first."""

OUTPUT_LIMIT = 300
"""Characters of a sample that are told: all samples fit one answer."""

PROMPT_TOKENS = 16
"""Of the request to a resident whose recipe nobody here knows."""

Ask = Callable[[float], Awaitable[tuple[int, int, str]]]
"""Sends one request, with a limit in seconds; gives both times and the output. Raises: AgentError"""


@dataclass(frozen=True)
class _Found:
    """What is ready: exactly one of the two."""

    serving: Serving | None = None
    held: Held | None = None


class Verifying:
    """Asks models, several at a time where several ask."""

    def __init__(
        self,
        state: StateDir,
        store: RunStore,
        residents: Residents,
        servers: Servers,
        workers: Workers,
        keeper: KeeperLink,
    ) -> None:
        self._state, self._store, self._residents = state, store, residents
        self._servers, self._workers, self._keeper = servers, workers, keeper

    async def verify(self, params: VerifyParams) -> VerifyResult:
        """Return the samples, in order. Raises: RefusedError ``not_ready``, ``busy``; then nothing was asked"""
        await self._residents.kept.refresh()
        found = self._find(params)
        if params.recipe is not None:
            _refuse_other(params.recipe, found)
        if found.serving is not None:
            return await self._through_port(found.serving, params)
        assert found.held is not None
        if found.held.resident.tier is Tier.STANDBY:
            return await self._in_standby(found.held, params)
        async with self._attached(found.held, params) as worker:
            samples = await _sample(params, _asker(worker))
        return VerifyResult(samples, Tier.RESIDENT, found.held.resident.run_uid, "attached")

    def _find(self, params: VerifyParams) -> _Found:
        model = params.model
        servers = [
            one for one in self._servers.serving if model in (one.recipe.name, one.recipe.model.path, one.resident)
        ]
        if servers:  # the recipe of that name, where others serve the same model too
            return _Found(max(servers, key=lambda one: one.recipe.name == model))
        there = [held for held in self._residents.held if model in _names_of(held.resident)]
        self._refuse_unserved(params, there)
        for tier in (Tier.STANDBY, Tier.RESIDENT):
            for held in there:
                if held.resident.tier is tier:
                    return _Found(held=held)
        tiers = ", ".join(dict.fromkeys(held.resident.tier.value for held in there))
        what = f"it is {tiers} alone, and that answers no request" if there else "nothing of it is warm"
        raise RefusedError("not_ready", f"{model[:200]} is not ready on this node: {what}")

    def _refuse_unserved(self, params: VerifyParams, there: list[Held]) -> None:
        """Refuse a recipe that is to be served and is not: that its weights would answer is not what was promised."""
        known = [held.order.recipe for held in there if held.order is not None]
        recipes = [one for one in (params.recipe, *known) if one is not None and one.name == params.model]
        if recipes and recipes[0].serve is not None:
            text = f"nothing serves it on {recipes[0].serve.address}: its server has stopped or died, warm it again"
            raise RefusedError("not_ready", f"{params.model} is not ready on this node: {text}")

    async def _through_port(self, serving: Serving, params: VerifyParams) -> VerifyResult:
        async def ask(limit_s: float) -> tuple[int, int, str]:
            if serving not in self._servers.serving:  # whoever listens there now is another
                raise NoCompletionError(f"its server has ended: {serving.reason or 'it died'}")
            found = await in_thread(ask_completion, serving.recipe, limit_s)
            return found.first_output_ns, found.total_ns, found.output

        tiers = [one.tier for one in self._residents.all() if one.name == serving.resident]
        samples = await _sample(params, ask)
        return VerifyResult(samples, tiers[0] if tiers else Tier.RESIDENT, serving.server.run_uid, "port")

    async def _in_standby(self, held: Held, params: VerifyParams) -> VerifyResult:
        """Ask a standby, which is free for runs between two samples."""
        refuse_busy(held)
        assert held.worker is not None
        worker, ask_worker = held.worker, _asker(held.worker)

        async def ask(limit_s: float) -> tuple[int, int, str]:
            try:
                refuse_busy(self._residents.of_worker(worker))
            except RefusedError as error:
                raise NoAnswerError(str(error)) from error
            except KeyError:
                raise NoAnswerError("its standby has gone") from None
            self._residents.take(worker, VERIFYING)
            try:
                return await ask_worker(limit_s)
            finally:
                self._residents.give_back(worker)

        return VerifyResult(await _sample(params, ask), Tier.STANDBY, held.resident.run_uid, "standby")

    @contextlib.asynccontextmanager
    async def _attached(self, held: Held, params: VerifyParams) -> AsyncIterator[Worker]:
        """Give a process that has a resident attached; it ends with the block. Raises: RefusedError ``not_ready``"""
        name = held.resident.name
        assert name is not None
        worker, order = None, None
        try:
            manifest = await self._keeper.manifest(name)
            order = self._order(held, manifest, params)
            go = WorkerGo(manifest.shards, name, is_resident=True)
            worker = await self._workers.start_attached(order, go, serves=False)
            await _until_attached(worker)
            yield worker
        except (KeeperError, ResidentLostError, SpawnError, NoAnswerError) as error:
            raise RefusedError("not_ready", f"{name} can't be asked: {error}") from error
        finally:
            if worker is not None:
                await worker.release()
            if order is not None:
                order.stderr.unlink(missing_ok=True)

    def _order(self, held: Held, manifest: Manifest, params: VerifyParams) -> Order:
        uid = f"verify-{uuid.uuid4().hex}"
        known = held.order
        python = params.python or (known.python if known is not None else ())
        recipe = params.recipe or (known.recipe if known is not None else _plain_recipe(manifest))
        root = self._state.root
        log = self._store.stderr_path(uid)
        return Order(uid, recipe, manifest.device, python, str(self._state.cache), log, str(root), manifest.owner)


def _refuse_other(recipe: Recipe, found: _Found) -> None:
    """Refuse what is warm by a recipe's name and is another model, or is served elsewhere, than the recipe says now."""
    model = found.serving.recipe.model.path if found.serving is not None else _of(found).model
    problem = f"what is warm is {model}, and the recipe names {recipe.model.path}" if model != recipe.model.path else ""
    if found.serving is not None and recipe.serve is not None and recipe.name == found.serving.recipe.name:
        here, there = recipe.serve.address, found.serving.server.address
        problem = problem or (f"it is served on {there}, and the recipe names {here}" if here != there else "")
    if problem:
        raise RefusedError("not_ready", f"{recipe.name} is not ready on this node: {problem}: warm it again")


def _of(found: _Found) -> Resident:
    assert found.held is not None
    return found.held.resident


async def _sample(params: VerifyParams, ask: Ask) -> tuple[VerifySample, ...]:
    samples: list[VerifySample] = []
    begun_s = time.monotonic()
    for number in range(params.count):
        await asyncio.sleep(max(0.0, begun_s + number * params.interval_s - time.monotonic()))
        t_wall_ns = time.time_ns()
        try:
            first_ns, total_ns, output = await ask(params.timeout_s)
            samples.append(VerifySample(t_wall_ns, first_ns, total_ns, output[:OUTPUT_LIMIT]))
        except (NoCompletionError, NoAnswerError) as error:
            samples.append(VerifySample(t_wall_ns, error=str(error)[:OUTPUT_LIMIT]))
    return tuple(samples)


def _asker(worker: Worker) -> Ask:
    """Return what asks a process; once that is late nothing more is asked, lest its answer count for another."""
    late: list[str] = []

    async def ask(limit_s: float) -> tuple[int, int, str]:
        if late:
            raise NoAnswerError(f"not asked: an earlier request is still unanswered: {late[0]}")
        try:
            answer = await worker.ask(WorkerAsk(), WorkerAnswer, limit_s)
        except LateAnswerError as error:
            late.append(str(error))
            raise
        return answer.first_output_ns, answer.total_ns, answer.output

    return ask


async def _until_attached(worker: Worker) -> None:
    """Wait until a process has attached. Raises: NoAnswerError"""
    attached: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def hear(_: Worker, message: InternalMessage) -> None:
        if attached.done():
            return
        if isinstance(message, WorkerAttached):
            attached.set_result(None)
        elif isinstance(message, WorkerFailed):
            attached.set_exception(NoAnswerError(message.failure.detail))

    worker.on_message = hear
    awaited: set[asyncio.Future[Any]] = {attached, worker.gone}
    await asyncio.wait(awaited, timeout=ATTACH_S, return_when=asyncio.FIRST_COMPLETED)
    if attached.done():
        attached.result()
    elif worker.gone.done():
        raise NoAnswerError(f"its process {worker.gone.result()}")
    else:
        raise NoAnswerError(f"its process did not attach within {ATTACH_S:g} s")


def _plain_recipe(manifest: Manifest) -> Recipe:
    """Return a recipe for weights of which only the keeper's manifest tells."""
    model, request = ModelSource(manifest.model), FirstRequest(prompt_tokens=PROMPT_TOKENS)
    return Recipe(manifest.recipe, model, devices=(manifest.device,), target_tier="resident", request=request)


def _names_of(resident: Resident) -> tuple[str | None, ...]:
    return resident.recipe, resident.model, resident.name
