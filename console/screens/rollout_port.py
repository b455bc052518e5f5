"""What the screens need of rollouts; `console.rollout.carrying.Carrier` is one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from console.errors import UsageError
from console.rollout.carrying import Notice
from console.rollout.others import Other
from console.rollout.plan import Plan
from console.rollout.reaching import Answer
from console.rollout.states import RolloutState
from console.rollout.view import RolloutView
from console.screens.ports import REFUSAL
from db.rollout_records import RolloutRow


class RolloutsPort(Protocol):
    """Methods that ask or act raise GlowplugError, one line for a person; none blocks the event loop."""

    @property
    def names(self) -> tuple[str, ...]: ...
    @property
    def carried(self) -> Mapping[str, RolloutState]: ...
    def take_notices(self) -> list[Notice]: ...
    async def listed(self) -> tuple[RolloutRow, ...]: ...
    async def others(self) -> tuple[Other, ...]: ...
    async def read(self, rollout_uid: str) -> RolloutView | None: ...
    async def plan(self, name: str) -> Plan: ...
    async def start(self, plan: Plan) -> str: ...
    async def ask(self, rollout_uid: str, verb: str, arguments: Mapping[str, object]) -> Answer: ...
    async def close(self) -> None: ...
    def hurry(self) -> None: ...


class ReadOnlyRollouts:
    """Rollouts of which none can be begun or steered, whatever asks for it. Everything else is as it was."""

    carried: Mapping[str, RolloutState] = {}

    def __init__(self, rollouts: RolloutsPort) -> None:
        self._rollouts = rollouts

    @property
    def names(self) -> tuple[str, ...]:
        return self._rollouts.names

    def take_notices(self) -> list[Notice]:
        return self._rollouts.take_notices()

    async def listed(self) -> tuple[RolloutRow, ...]:
        return await self._rollouts.listed()

    async def others(self) -> tuple[Other, ...]:
        return await self._rollouts.others()

    async def read(self, rollout_uid: str) -> RolloutView | None:
        return await self._rollouts.read(rollout_uid)

    async def plan(self, name: str) -> Plan:
        return await self._rollouts.plan(name)

    async def start(self, plan: Plan) -> str:
        raise UsageError(REFUSAL)

    async def ask(self, rollout_uid: str, verb: str, arguments: Mapping[str, object]) -> Answer:
        raise UsageError(REFUSAL)

    async def close(self) -> None:
        await self._rollouts.close()

    def hurry(self) -> None:
        self._rollouts.hurry()
