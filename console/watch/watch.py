"""Watches several nodes at once, each for itself, as long as there is one to watch."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from console.errors import GlowplugError
from console.fleet import Fleet
from console.watch.leases import Leases
from console.watch.machine import Limits, Told
from console.watch.standing import Wanted
from console.watch.watcher import NodeWatch, Tell


class Watch:
    """``ended``: by node, why it is not watched any more."""

    def __init__(
        self, fleet: Fleet, nodes: Sequence[str], wanted: Wanted, limits: Limits, leases: Leases, tell: Tell
    ) -> None:
        self.ended: dict[str, GlowplugError] = {}
        self._fleet = fleet
        self._leases = leases
        self._tell = tell
        self._watches = {node: NodeWatch(fleet, node, wanted, limits, leases, tell) for node in nodes}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def going(self) -> dict[str, str]:
        """The runs of this watch that their nodes have accepted and that are not over, by node."""
        tries = [(node, self._fleet.state(node).runs.get(one.run_uid or "")) for node, one in self._watches.items()]
        return {node: run.run_uid for node, run in tries if run and run.is_accepted and not run.state.is_terminal}

    async def run(self) -> None:
        """Watch until no node is left, or it is cancelled."""
        self._tasks = {node: asyncio.ensure_future(one.run()) for node, one in self._watches.items()}
        renewing = asyncio.ensure_future(self._leases.run(self._drop_lost))
        try:
            while self._tasks:
                await asyncio.wait([renewing, *self._tasks.values()], return_when=asyncio.FIRST_COMPLETED)
                if renewing.done():
                    renewing.result()
                self._take_out_ended()
        finally:
            tasks = [renewing, *self._tasks.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _drop_lost(self) -> None:
        for node in self._leases.lost.keys() & self._tasks.keys():
            self._tasks[node].cancel()

    def _take_out_ended(self) -> None:
        for node, task in [(node, task) for node, task in self._tasks.items() if task.done()]:
            del self._tasks[node]
            error = self._leases.lost[node] if task.cancelled() else task.exception()
            if not isinstance(error, GlowplugError):
                raise error or AssertionError(f"the watch of {node} ended by itself")
            self.ended[node] = error
            self._tell(node, Told("ended", reason=str(error)))
