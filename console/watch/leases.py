"""The right to load watched nodes: a lease each in the history, and no rollout at work there."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence

import db.errors
from console.errors import HistoryError
from db import rollouts
from db.queries import History
from db.watch_store import WatchStore

log = logging.getLogger(__name__)


class Leases:
    """Renews the leases that ``store`` has taken, for as long as `run` goes on.

    ``lost``: by node, that another watches it by now. While the history can't be written nothing is lost, and nothing
    may be loaded once a lease may have run out. ``clock``: seconds of wall time, which goes on while a machine sleeps.
    """

    def __init__(
        self, store: WatchStore, history: History, nodes: Sequence[str], clock: Callable[[], float] = time.time
    ) -> None:
        self.lost: dict[str, HistoryError] = {}
        self._store = store
        self._history = history
        self._nodes = tuple(nodes)
        self._clock = clock
        self._kept_s = -math.inf  # that they were taken may be long ago
        self._problem = ""

    async def run(self, lost: Callable[[], None]) -> None:
        """Renew them in good time; ``lost`` is called where one is another's."""
        while True:
            await asyncio.sleep(self._store.lease_s / 4)
            known = len(self.lost)
            await self._keep()
            if len(self.lost) > known:
                lost()

    async def in_the_way(self, node: str) -> str:
        """Return why the node may not be loaded now, or nothing. Raises: HistoryError if another watches it by now."""
        if not 0 <= self._clock() - self._kept_s < self._store.lease_s / 4:
            await self._keep()
        if node in self.lost:
            raise self.lost[node]
        if self._clock() - self._kept_s > self._store.lease_s:
            return f"that this watches it can't be kept up: {self._problem}"
        try:
            claims = await asyncio.to_thread(rollouts.claims, self._history, node)
        except db.errors.HistoryError as error:
            return f"whether a rollout is at it can't be read: {error}"
        return "; ".join(claims)

    async def _keep(self) -> None:
        began_s = self._clock()
        try:
            taken = await asyncio.to_thread(self._store.keep, [name for name in self._nodes if name not in self.lost])
        except db.errors.HistoryError as error:
            log.warning("leases not renewed: %s", error)
            self._problem = str(error)
            return
        self._kept_s = began_s
        for row in taken:
            self.lost[row.node] = HistoryError(f"{row.node} is watched for {row.recipe} by {row.who} now")
