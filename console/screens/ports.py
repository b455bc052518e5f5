"""What the app needs of a fleet; `console.fleet.Fleet` is one, the tests' own is another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from console.errors import UsageError
from console.state import NodeState
from db.records import Baseline, EventRow, RunFilter, RunRow, StageRow
from remote_agent.protocol.messages import Recipe

REFUSAL = "the console is read-only"
RunWithStages = tuple[RunRow, tuple[StageRow, ...]]


class HistoryPort(Protocol):
    """Blocking reads, called in threads only."""

    def runs(self, wanted: RunFilter | None = None) -> tuple[RunRow, ...]: ...
    def run(self, run_uid: str) -> RunWithStages | None: ...
    def previous_run(self, run_uid: str) -> RunWithStages | None: ...
    def events(self, run_uid: str) -> tuple[EventRow, ...]: ...
    def count(self) -> int: ...
    def baseline(
        self,
        node: str,
        recipe_hash: str,
        tier_from: str,
        count: int = 20,
        before: str | None = None,
        armed: bool = False,
    ) -> Baseline | None: ...


class ConfigPort(Protocol):
    @property
    def recipes(self) -> Mapping[str, Recipe]: ...


class FleetPort(Protocol):
    """Methods that reach out raise GlowplugError, one line for a person."""

    parallel: int

    @property
    def nodes(self) -> tuple[str, ...]: ...
    @property
    def history(self) -> HistoryPort: ...
    @property
    def config(self) -> ConfigPort: ...
    @property
    def notices(self) -> tuple[str, ...]: ...
    def state(self, name: str) -> NodeState: ...
    def take_dirty(self) -> set[str]: ...
    def retry_now(self, node: str) -> None: ...
    async def start(self) -> None: ...
    async def close(self) -> None: ...
    async def warm(self, node: str, recipe_name: str, *, run_uid: str | None = None) -> str: ...
    async def cancel(self, node: str, run_uid: str) -> object: ...
    async def release(self, node: str, run_uid: str | None = None) -> object: ...
    async def park(self, node: str, run_uid: str) -> object: ...
    async def unpark(self, node: str, run_uid: str) -> object: ...
    async def probe(self, node: str) -> object: ...


class ReadOnlyFleet:
    """A fleet on which nothing can be started, cancelled, released or parked, whatever asks for it.

    Everything else is the fleet's own.
    """

    def __init__(self, fleet: FleetPort) -> None:
        self._fleet = fleet

    @property
    def nodes(self) -> tuple[str, ...]:
        return self._fleet.nodes

    @property
    def history(self) -> HistoryPort:
        return self._fleet.history

    @property
    def config(self) -> ConfigPort:
        return self._fleet.config

    @property
    def notices(self) -> tuple[str, ...]:
        return self._fleet.notices

    @property
    def parallel(self) -> int:
        return self._fleet.parallel

    @parallel.setter
    def parallel(self, parallel: int) -> None:
        raise UsageError(REFUSAL)

    def state(self, name: str) -> NodeState:
        return self._fleet.state(name)

    def take_dirty(self) -> set[str]:
        return self._fleet.take_dirty()

    def retry_now(self, node: str) -> None:
        self._fleet.retry_now(node)

    async def start(self) -> None:
        await self._fleet.start()

    async def close(self) -> None:
        await self._fleet.close()

    async def probe(self, node: str) -> object:
        return await self._fleet.probe(node)

    async def warm(self, node: str, recipe_name: str, *, run_uid: str | None = None) -> str:
        raise UsageError(REFUSAL)

    async def cancel(self, node: str, run_uid: str) -> object:
        raise UsageError(REFUSAL)

    async def release(self, node: str, run_uid: str | None = None) -> object:
        raise UsageError(REFUSAL)

    async def park(self, node: str, run_uid: str) -> object:
        raise UsageError(REFUSAL)

    async def unpark(self, node: str, run_uid: str) -> object:
        raise UsageError(REFUSAL)
