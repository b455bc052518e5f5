"""The table of what is warm on this node. Each entry appears, changes and goes with one event."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from remote_agent.agentd.events import EventLog
from remote_agent.agentd.workers import Order, Worker
from remote_agent.protocol.messages import Recipe, Resident, ResidentChanged, Server, Tier
from remote_agent.recipe import armed_hash, model_hash, warm_hash

NO_STEPS: Mapping[str, int] = {}


@dataclass(frozen=True)
class ReuseKey:
    """What must be equal for a standby to serve a run again; its files are compared besides.

    ``content_hash``: of the recipe, or of the model alone where the standby holds what any recipe of it can use.
    """

    content_hash: str
    environment: tuple[tuple[str, str], ...]
    python: tuple[str, ...]
    device: str


def reuse_key(recipe: Recipe, python: tuple[str, ...], device: str, tier: Tier) -> ReuseKey:
    """Return the key of a process that has what ``recipe`` makes up to ``tier``, which may serve more recipes too."""
    digest = {Tier.ARMED: armed_hash, Tier.HOST: model_hash}.get(tier, warm_hash)
    return ReuseKey(digest(recipe), tuple(sorted(recipe.environment.items())), python, device)


@dataclass(eq=False)
class Held:
    """A warm model: a standby's, by its ``worker``, or the keeper's alone.

    ``order``: what it was made for, where a run of this agent did that. ``reason``: why it will be gone.
    ``is_dropped``: the keeper has let go of its part. ``is_moving``: it is being parked or unparked.
    ``used_wall_ns``: when a run or an attached process was last seen to use it.
    """

    resident: Resident
    worker: Worker | None = None
    key: ReuseKey | None = None
    order: Order | None = None
    busy_with: str | None = None
    reason: str | None = None
    is_dropped: bool = False
    is_moving: bool = False
    timer: asyncio.TimerHandle | None = None
    used_wall_ns: int = 0

    def __post_init__(self) -> None:
        self.used_wall_ns = self.used_wall_ns or self.resident.since_wall_ns

    @property
    def is_off_device(self) -> bool:
        """Whether the driver may hold its process still, so that only a kill ends it."""
        return self.is_moving or self.resident.tier is Tier.PARKED


class Holders:
    """Every warm model of this node."""

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self.servers_of: Callable[[str | None], tuple[Server, ...]] = lambda name: ()
        self._held: dict[Held, None] = {}

    def __iter__(self) -> Iterator[Held]:
        return iter(list(self._held))

    def __contains__(self, held: Held) -> bool:
        return held in self._held

    def of_worker(self, worker: Worker) -> Held | None:
        return next((held for held in self._held if held.worker is worker), None)

    def of_name(self, name: str | None) -> Held | None:
        """Return who stands for what the keeper calls ``name``."""
        return next((held for held in self._held if name is not None and held.resident.name == name), None)

    def add(self, held: Held) -> None:
        held.resident = replace(held.resident, servers=self.servers_of(held.resident.name))
        self._held[held] = None
        self._events.emit(ResidentChanged(held.resident, "held"), held.resident.run_uid)

    def restore(self, held: Held) -> None:
        """Take in an entry that an agent before has told of."""
        self._held[held] = None

    def change(self, held: Held, steps: Mapping[str, int] = NO_STEPS, **fields: object) -> None:
        """Tell what is different about an entry, if anything is, and what that took."""
        changed = replace(held.resident, **fields)  # type: ignore[arg-type]
        changed = replace(changed, servers=self.servers_of(changed.name))
        if changed != held.resident:
            held.resident = changed
            self._events.emit(ResidentChanged(changed, "held", steps=steps), changed.run_uid)

    def remove(self, held: Held, reason: str) -> None:
        """Take an entry out, if it is still there."""
        if held in self._held:
            del self._held[held]
            if held.timer is not None:
                held.timer.cancel()
            self._events.emit(ResidentChanged(held.resident, "gone", held.reason or reason), held.resident.run_uid)
