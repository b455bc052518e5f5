"""Rollouts that are only their views: implements `RolloutsPort`, records what it is asked to do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from console.errors import GlowplugError
from console.rollout.carrying import Notice
from console.rollout.others import Other
from console.rollout.plan import Plan
from console.rollout.reaching import Answer
from console.rollout.states import RolloutState
from console.rollout.view import RolloutView
from db.rollout_records import RolloutRow


class FakeRollouts:
    """Views are what `views` has, newest first; ``answer`` is what every verb is answered with."""

    def __init__(self, views: Iterable[RolloutView] = ()) -> None:
        self.views = list(views)
        self.names: tuple[str, ...] = ()
        self.carried: Mapping[str, RolloutState] = {}
        self.unfinished: tuple[Other, ...] = ()
        self.notices: list[Notice] = []
        self.asked: list[tuple[str, str, Mapping[str, object]]] = []
        self.answer: Answer = (True, "done")
        self.refuses: GlowplugError | None = None
        self.is_open = True

    def take_notices(self) -> list[Notice]:
        notices, self.notices = self.notices, []
        return notices

    async def listed(self) -> tuple[RolloutRow, ...]:
        return tuple(view.row for view in self.views)

    async def others(self) -> tuple[Other, ...]:
        if self.refuses is not None:
            raise self.refuses
        return self.unfinished

    async def read(self, rollout_uid: str) -> RolloutView | None:
        if self.refuses is not None:
            raise self.refuses
        return next((view for view in self.views if view.row.rollout_uid == rollout_uid), None)

    async def plan(self, name: str) -> Plan:
        raise GlowplugError(f"no rollout {name}")

    async def start(self, plan: Plan) -> str:
        raise GlowplugError(f"no rollout {plan.rollout.name}")

    async def ask(self, rollout_uid: str, verb: str, arguments: Mapping[str, object]) -> Answer:
        self.asked.append((rollout_uid, verb, arguments))
        return self.answer

    async def close(self) -> None:
        self.is_open = False

    def hurry(self) -> None:
        pass
