"""How warm a recipe is on a node, by what the node says. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from console.state import LinkStatus, NodeState
from remote_agent.protocol.messages import Probe, Recipe, Resident, ResidentChanged, Tier

Key = tuple[str, str]
"""Run uid and device: what a node tells its warm models apart by."""

_RANKS = {tier: rank for rank, tier in enumerate(Tier)}
_PROCESSES = (Tier.PARKED, Tier.STANDBY)


@dataclass(frozen=True)
class Wanted:
    """What is to be there: a recipe, at that tier or a warmer one."""

    recipe: Recipe
    tier: Tier


@dataclass(frozen=True)
class Seen:
    """A node at one moment. ``unreachable``: why it can't be asked; None while that is not sure, or it can.

    ``is_final``: no retry will be made. ``tier``: the coldest over the recipe's devices, None until it is known.
    ``held``: what makes it.
    """

    is_known: bool = False
    unreachable: str | None = None
    is_final: bool = False
    tier: Tier | None = None
    held: frozenset[Key] = frozenset()
    boot_id: str | None = None
    agent_pid: int | None = None
    gone: tuple[ResidentChanged, ...] = ()


def see(state: NodeState, wanted: Wanted) -> Seen:
    """Return what a node's state says of what is wanted."""
    lost = state.link.status in (LinkStatus.SILENT, LinkStatus.DISCONNECTED)
    unreachable = (state.link.reason or f"the link is {state.link.status.value}") if lost else None
    if state.residents is None or state.hello is None:
        return Seen(False, unreachable, state.link.final)
    entries = _by_device(state.residents, wanted.recipe)
    devices = _devices(wanted.recipe, state.probe)
    if devices is None:
        entries = dict(sorted(entries.items(), key=lambda item: _RANKS[item[1][0]])[-1:])
    else:
        entries = {device: entries[device] for device in devices if device in entries}
    is_whole = len(entries) == (len(devices) if devices is not None else 1)
    tier = min((tier for tier, _ in entries.values()), key=_RANKS.__getitem__) if is_whole else Tier.COLD
    keys = frozenset((one.run_uid, one.device) for _, one in entries.values())
    hello = state.hello
    return Seen(state.is_known, unreachable, state.link.final, tier, keys, hello.boot_id, hello.pid, state.gone)


def is_at(tier: Tier, wanted: Tier) -> bool:
    """Whether ``tier`` is that one or a warmer one."""
    return _RANKS[tier] >= _RANKS[wanted]


def _by_device(residents: Iterable[Resident], recipe: Recipe) -> dict[str, tuple[Tier, Resident]]:
    """Return, by device, the warmest that is there of the recipe's model, as far as the recipe can use it."""
    best: dict[str, tuple[Tier, Resident]] = {}
    for one in residents:
        tier = _usable_tier(one, recipe)
        if tier is not None and (one.device not in best or _RANKS[tier] > _RANKS[best[one.device][0]]):
            best[one.device] = tier, one
    return best


def _usable_tier(one: Resident, recipe: Recipe) -> Tier | None:
    """A process of another recipe is not this one's, but its weights are where the keeper has them; armed has none."""
    if one.model != recipe.model.path or one.tier is Tier.ARMED:
        return None
    if one.recipe == recipe.name or one.tier not in _PROCESSES:
        return one.tier
    return Tier.RESIDENT if one.name is not None else None


def _devices(recipe: Recipe, probe: Probe | None) -> tuple[str, ...] | None:
    """Return the devices that the recipe means on a node; None where any one is meant, or it is not known."""
    if not recipe.needs_device or probe is None:
        return None
    gpus = sorted(probe.gpus, key=lambda gpu: gpu.index)
    if recipe.devices[0] in ("auto", "all"):
        found = gpus if recipe.devices[0] == "all" else gpus[:1]
        return tuple(gpu.uuid for gpu in found) or None
    uuids = {f"cuda:{gpu.index}": gpu.uuid for gpu in gpus}
    return tuple(uuids.get(device, device) for device in recipe.devices)
