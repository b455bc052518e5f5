"""Keeps the table of warm models in step with the keeper: either of the two may end while the other lives on."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable

from remote_agent.agentd import hostfacts
from remote_agent.agentd.holders import Held, Holders
from remote_agent.agentd.keeping import KeeperLink
from remote_agent.errors import AgentError, KeeperError, ResidentLostError
from remote_agent.keeper.client import Listed
from remote_agent.protocol.internal import Manifest
from remote_agent.protocol.messages import Resident, Tier

log = logging.getLogger(__name__)


class Kept:
    """``settled`` is set once the keeper was asked for the first time."""

    def __init__(
        self,
        holders: Holders,
        keeper: KeeperLink,
        arm: Callable[[Held], None],
        orphaned: Callable[[Held, str], None],
    ) -> None:
        """``orphaned`` hears of a worker's entry whose part at the keeper is gone, and why."""
        self._holders, self._keeper, self._arm, self._orphaned = holders, keeper, arm, orphaned
        self._expected: dict[str, str] = {}
        self._unreadable: set[str] = set()
        self._complaint = ""
        self.settled = asyncio.Event()

    def remember(self, resident: Resident) -> None:
        """Take in what the agent before had the keeper hold; whether it still does is asked soon."""
        held = Held(resident)
        self._holders.restore(held)
        self._arm(held)

    def expect(self, name: str, run_uid: str) -> None:
        """Say that a run may leave ``name`` with the keeper, so that it is nobody else's find meanwhile."""
        self._expected[name] = run_uid

    def expect_no_more(self, run_uid: str) -> None:
        self._expected = {name: uid for name, uid in self._expected.items() if uid != run_uid}

    def has(self, name: str) -> bool:
        """Whether the keeper has ``name``, as far as is known."""
        return self._holders.of_name(name) is not None

    def lost(self, name: str, reason: str) -> None:
        """Take note that what the keeper had could not be used and was dropped."""
        held = self._holders.of_name(name)
        if held is not None:
            self._take_away(held, reason)

    def all_lost(self, reason: str) -> None:
        """Take note that the keeper was ended."""
        for held in self._holders:
            if held.resident.name is not None:
                self._take_away(held, reason)

    async def watch(self, interval_s: float) -> None:
        """Compare again and again."""
        while True:
            await self._try_to_compare()
            self.settled.set()
            await asyncio.sleep(interval_s)

    async def refresh(self) -> None:
        """Compare now; what can't be asked stays as it was known."""
        await self.settled.wait()
        await self._try_to_compare()

    async def _try_to_compare(self) -> None:
        try:
            await self.compare()
            self._complaint = ""
        except KeeperError as error:
            if self._complaint != str(error):
                log.warning("the keeper can't be asked what it holds: %s", error)
            self._complaint = str(error)
        except Exception:
            log.exception("the keeper's residents can't be compared")

    async def compare(self) -> None:
        """Take in what the keeper has and nobody stands for; let go what it no longer has. Raises: KeeperError"""
        had_keeper = self._keeper.pid
        before = set(
            self._holders
        )  # what is put while the keeper answers is not missing, also under a name known before
        listed = {one.name: one for one in await self._keeper.residents()}
        for held in self._holders:
            name = held.resident.name
            if name is not None and name in listed:
                if listed[name].attached or held.resident.attached:
                    held.used_wall_ns = time.time_ns()
                self._holders.change(held, attached=len(listed[name].attached))
            elif held in before and name is not None:
                self._take_away(held, self._why_missing(held.resident, had_keeper))
        self._unreadable &= listed.keys()
        known = self._unreadable | self._expected.keys()  # what can't be read is sealed: it stays so
        await self._adopt(one for name, one in listed.items() if not self.has(name) and name not in known)

    async def _adopt(self, found: Iterable[Listed]) -> None:
        for one in list(found):
            try:
                manifest = await self._keeper.manifest(one.name)
            except ResidentLostError as error:
                self._unreadable.add(one.name)
                log.error("the keeper's resident %s can't be told: %s", one.name, error)
                continue
            except AgentError as error:
                log.warning("the keeper's resident %s can't be asked for: %s", one.name, error)
                continue
            if not self.has(one.name):
                held = Held(_resident(manifest, len(one.attached)))
                self._holders.add(held)
                self._arm(held)

    def _take_away(self, held: Held, reason: str) -> None:
        """The keeper's part of ``held`` is gone; a worker's, if there is one, is not."""
        if held.worker is not None:
            self._holders.change(held, name=None, attached=0)
            self._orphaned(held, reason)
        else:
            self._holders.remove(held, reason)

    def _why_missing(self, resident: Resident, had_keeper: int | None) -> str:
        if resident.since_wall_ns < hostfacts.boot_wall_ns():
            return "the host was booted since"
        if self._keeper.pid is None:
            return f"its keeper{f', process {had_keeper},' if had_keeper else ''} has ended"
        return "the keeper no longer has it"


def _resident(manifest: Manifest, attached: int) -> Resident:
    return Resident(
        manifest.run_uid,
        manifest.recipe,
        manifest.model,
        manifest.device,
        Tier.RESIDENT,
        manifest.size_bytes,
        None,
        manifest.owner,
        manifest.created_wall_ns,
        manifest.ttl_s,
        manifest.name,
        attached,
    )
