"""What a node is asked, one request each, once it can be asked; the first part of a fleet."""

from __future__ import annotations

import abc
from typing import TypeVar

from console.session import Session
from remote_agent.protocol.messages import (
    CacheClearParams,
    CacheClearResult,
    CacheListParams,
    CacheListResult,
    ParkParams,
    ParkResult,
    Probe,
    Recipe,
    ReleaseParams,
    ReleaseResult,
    Resident,
    RunRecord,
    RunResult,
    RunUidParams,
    Server,
    ServeStopParams,
    ServeStopResult,
    StandbyStopParams,
    StandbyStopResult,
    StatusResult,
    VerifyParams,
    VerifyResult,
)

T = TypeVar("T")

ANSWER_S = 12.0
STOP_S = 10.0
"""How long a server may take to end."""
ATTACH_S = 120.0
"""How long a process may take that attaches to a resident; its imports may come first."""
PARK_S = 600.0
"""How long a driver may take to move a whole GPU's memory to or from the host's."""


class Requests(abc.ABC):
    """Each raises LinkError where the node can't be asked, and RequestRefused where it says no."""

    @abc.abstractmethod
    def _session(self, name: str) -> Session:
        """Return the session of a node. Raises: UsageError for a name that is not followed."""

    async def cancel_run(self, node: str, run_uid: str) -> RunRecord:
        """Have the node end a run; return what it is then. Raises: LinkError, RequestRefused."""
        answer = await self.ask(node, "run.cancel", RunUidParams(run_uid), RunResult)
        self._session(node).found(answer.run)
        return answer.run

    async def find_run(self, node: str, run_uid: str, timeout_s: float = ANSWER_S) -> RunRecord:
        """Return a run as its node has it now. Raises: LinkError, RequestRefused."""
        answer = await self.ask(node, "run.get", RunUidParams(run_uid), RunResult, timeout_s)
        self._session(node).found(answer.run)
        return answer.run

    async def ask(self, node: str, method: str, params: object, result: type[T], timeout_s: float = ANSWER_S) -> T:
        """Ask the node one thing, once it can be asked. Raises: LinkError, RequestRefused."""
        session = self._session(node)
        await session.until_connected(session.node.connect_timeout_s)
        return await session.request(method, params, result, timeout_s)

    async def release(self, node: str, run_uid: str | None = None) -> tuple[Resident, ...]:
        """Let go of what a run left warm, of everything by default. Raises: LinkError, RequestRefused."""
        return (await self.let_go(node, ReleaseParams(run_uid, everything=run_uid is None))).released

    async def let_go(self, node: str, params: ReleaseParams) -> ReleaseResult:
        """Let go of what is named; the answer may take ``wait_s`` longer. Raises: LinkError, RequestRefused."""
        answer = await self.ask(node, "resident.release", params, ReleaseResult, ANSWER_S + params.wait_s)
        await self._session(node).status()
        return answer

    async def stop_standbys(self, node: str, recipe_name: str) -> tuple[Resident, ...]:
        """End the standbys of a recipe, armed or with weights; what is resident of it stays.

        Raises: LinkError, RequestRefused.
        """
        answer = await self.ask(node, "standby.stop", StandbyStopParams(recipe_name), StandbyStopResult)
        await self._session(node).status()
        return answer.stopped

    async def stop_servers(self, node: str, recipe_name: str | None = None) -> tuple[Server, ...]:
        """Stop a recipe's server, every server by default; what they served stays warm.

        Raises: LinkError, RequestRefused.
        """
        session = self._session(node)
        await session.until_connected(session.node.connect_timeout_s)
        limit_s = ANSWER_S + STOP_S
        answer = await session.request("serve.stop", ServeStopParams(recipe_name), ServeStopResult, limit_s)
        await session.status()
        return answer.stopped

    async def verify(
        self,
        node: str,
        model: str,
        count: int = 1,
        interval_s: float = 0.0,
        recipe: Recipe | None = None,
        timeout_s: float = VerifyParams.timeout_s,
    ) -> VerifyResult:
        """Send real requests to what is ready of a model, each within ``timeout_s``.

        Raises: LinkError; RequestRefused where nothing is ready.
        """
        session = self._session(node)
        await session.until_connected(session.node.connect_timeout_s)
        params = VerifyParams(model, count, interval_s, timeout_s, recipe, python=session.node.python)
        limit_s = ANSWER_S + ATTACH_S + count * max(interval_s, params.timeout_s)
        return await session.request("verify", params, VerifyResult, limit_s)

    async def park(self, node: str, run_uid: str) -> ParkResult:
        """Take a run's standbys off their devices. Raises: LinkError, RequestRefused."""
        return await self._move(node, "park", run_uid)

    async def unpark(self, node: str, run_uid: str) -> ParkResult:
        """Put a run's parked standbys back. Raises: LinkError, RequestRefused."""
        return await self._move(node, "unpark", run_uid)

    async def _move(self, node: str, method: str, run_uid: str) -> ParkResult:
        answer = await self.ask(node, method, ParkParams(run_uid), ParkResult, PARK_S)
        await self._session(node).status()
        return answer

    async def probe(self, node: str) -> Probe:
        """Ask the node what it is. Raises: LinkError, RequestRefused."""
        session = self._session(node)
        await session.until_connected(session.node.connect_timeout_s)
        return await session.probe()

    async def status(self, node: str) -> StatusResult:
        """Ask the node what is on it. Raises: LinkError, RequestRefused."""
        session = self._session(node)
        await session.until_connected(session.node.connect_timeout_s)
        return await session.status()

    async def list_cache(self, node: str, directory: str | None = None) -> CacheListResult:
        """Ask the node what a compile cache keeps. Raises: LinkError, RequestRefused."""
        return await self.ask(node, "cache.list", CacheListParams(directory), CacheListResult)

    async def clear_cache(self, node: str, params: CacheClearParams) -> CacheClearResult:
        """Have the node clear what is named. Raises: LinkError; RequestRefused under a run, or without such a key."""
        return await self.ask(node, "cache.clear", params, CacheClearResult)
