"""What all links of one console share: how many connect at once, bastions, ssh's answers, and where keys are.

An OpenSSH server drops connections when more than its ``MaxStartups`` knock at once,
and three hundred handshakes at once stall the screen: eight at a time do neither.
"""

from __future__ import annotations

import asyncio
import os
import pwd
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from console.heap import Portions
from console.locations import Locations
from console.transports.ssh_oracle import Oracle

C = TypeVar("C")

CONNECT_LIMIT = 8
AGENT_LIMIT = 64
"""Logins at once that have a connection to an ssh-agent open, whose queue for new ones has 128 places."""


def _account_home() -> Path:
    """Return the home that ssh goes by, which is the account's whatever HOME says; HOME's for one without an entry."""
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        return Path("~").expanduser()


@dataclass
class Gate:
    """Made once a console. ``known_hosts_file``: ours; ``agent_socket``: of a running ssh-agent.

    ``home``: where files are that nobody named; ``account_home``: where ssh takes ``~`` to be.
    ``keys``: private keys that were opened with a passphrase, by file.
    ``environ``: of ssh and of a ProxyCommand; None: this process's own.
    """

    known_hosts_file: Path
    home: Path
    agent_socket: str | None = None
    ssh: str = "ssh"
    environ: Mapping[str, str] | None = None
    account_home: Path = field(default_factory=_account_home)
    random: Callable[[], float] = random.random
    connects: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(CONNECT_LIMIT))
    agents: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AGENT_LIMIT))
    bastions: dict[object, object] = field(default_factory=dict)
    keys: dict[Path, Shared[Any]] = field(default_factory=dict)
    portions: Portions = field(default_factory=Portions)
    oracle: Oracle = field(init=False)
    said: set[tuple[str, str]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.oracle = Oracle(self.ssh, self.environ)

    @classmethod
    def create(cls, locations: Locations, environ: Mapping[str, str]) -> Gate:
        """Return the gate of a console with these files and this environment."""
        home = environ.get("HOME") or str(Path("~").expanduser())
        return cls(locations.known_hosts_file, Path(home), environ.get("SSH_AUTH_SOCK") or None, environ=environ)

    def once(self, node: str, note: str) -> bool:
        """Say whether this is the first time that ``note`` is made of ``node``."""
        is_new = (node, note) not in self.said
        self.said.add((node, note))
        return is_new


class Shared(Generic[C]):
    """One thing that many use: opened by the first, closed after the last, opened again when it died."""

    def __init__(
        self,
        open_it: Callable[[], Awaitable[C]],
        close_it: Callable[[C], Awaitable[None]],
        is_alive: Callable[[C], bool],
    ) -> None:
        self._open, self._close, self._is_alive = open_it, close_it, is_alive
        self._opening: asyncio.Task[C] | None = None
        self.users = 0

    @property
    def is_there(self) -> bool:
        """Whether `acquire` would return at once."""
        return self._opening is not None and self._opening.done() and self._is_usable(self._opening)

    async def acquire(self) -> C:
        """Return the thing, opening it where it isn't open. Each acquire needs a `release`, a failed one too."""
        self.users += 1
        task = self._opening
        if task is None or (task.done() and not self._is_usable(task)):
            task = self._opening = asyncio.ensure_future(self._open_now())
        return await asyncio.shield(task)

    async def release(self) -> None:
        """Say that one user is done; the last one's release closes it."""
        self.users -= 1
        if self.users or self._opening is None:
            return
        task, self._opening = self._opening, None
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=1.0)
        elif self._is_usable(task):
            await self._close(task.result())

    async def _open_now(self) -> C:
        return await self._open()

    def _is_usable(self, task: asyncio.Task[C]) -> bool:
        return not task.cancelled() and task.exception() is None and self._is_alive(task.result())
