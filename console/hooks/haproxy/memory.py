"""What servers were before a rollout touched them: a small file a rollout and node, written before the first change.

The first state counts, whatever attempts follow and whoever crashes between them, until it was brought back
(`forget`). A server that is out of traffic because a rollout was never brought to its end is remembered as it was
before that one. Files lie at STATE/hooks/haproxy/NODE/, each named by a digest of its rollout.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from console.errors import HookFailed
from console.hooks.haproxy.protocol import Server, State
from remote_agent.protocol.codec import decode, encode

SIZE_LIMIT_BYTES = 1 << 20


@dataclass(frozen=True)
class Former:
    """A server, as it was found. ``pid``: the process that was asked."""

    socket: str
    server: str
    state: State
    weight: int
    pid: int

    @property
    def key(self) -> tuple[str, str]:
        return self.socket, self.server

    def __str__(self) -> str:
        return f"{self.state.value}, weight {self.weight}"


@dataclass(frozen=True)
class Record:
    """All of one rollout's servers of one node; ``is_shifted`` once they had their traffic again."""

    rollout: str
    node: str
    servers: tuple[Former, ...] = ()
    is_shifted: bool = False


class Memory:
    """One rollout's record of one node. Raises: HookFailed wherever it can't be read, written or removed."""

    def __init__(self, state_directory: Path, rollout: str, node: str) -> None:
        self._empty = Record(rollout, node)
        self._folder = state_directory / "hooks" / "haproxy" / node
        self.file = (
            self._folder / f"{hashlib.sha256(rollout.encode('utf-8', 'backslashreplace')).hexdigest()[:32]}.json"
        )

    def recall(self) -> Record:
        """Return what is remembered; a record without servers if nothing is."""
        return _read(self.file) or self._empty

    def remember(self, found: Mapping[tuple[str, str], Server]) -> tuple[Former, ...]:
        """Keep what servers are now, unless they are remembered already; return those that are new.

        It is on the disk before this returns. ``found``: by socket and server.
        """
        record = self.recall()
        known = {former.key for former in record.servers}
        left = self._left_behind()
        new = []
        for key, server in found.items():
            if key in known:
                continue
            former = Former(*key, server.state, server.weight, server.pid)
            if server.state is not State.READY and key in left:
                former = replace(left[key], pid=server.pid)
            new.append(former)
        if new or record.is_shifted:
            self._write(replace(record, servers=(*record.servers, *new), is_shifted=False))
        return tuple(new)

    def note_shifted(self) -> None:
        """Traffic is where it belongs: what other rollouts left behind of the node counts no more."""
        for file, _ in self._others():
            _remove(file)
        self._write(replace(self.recall(), is_shifted=True))

    def forget(self) -> None:
        """All is as it was."""
        _remove(self.file)

    def _left_behind(self) -> dict[tuple[str, str], Former]:
        """Return what rollouts that were not brought to their end remember as ready."""
        formers = (former for _, record in self._others() if not record.is_shifted for former in record.servers)
        return {former.key: former for former in formers if former.state is State.READY}

    def _others(self) -> Iterator[tuple[Path, Record]]:
        for file in sorted(self._folder.glob("*.json")):
            record = _read(file) if file != self.file else None
            if record is not None:
                yield file, record

    def _write(self, record: Record) -> None:
        fresh = self.file.with_name(f"{self.file.name}.{os.getpid()}")
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(fresh, "w", encoding="utf-8", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
                json.dump(encode(record), file, indent=2)
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(self.file)
            _sync(self._folder)
        except OSError as error:
            fresh.unlink(missing_ok=True)
            raise HookFailed(f"{self.file}: {error.strerror}") from error


def _read(file: Path) -> Record | None:
    try:
        with file.open("rb") as opened:
            return decode(Record, json.loads(opened.read(SIZE_LIMIT_BYTES)))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise HookFailed(f"{file}: {error.strerror}") from error
    except ValueError as error:
        raise HookFailed(f"{file}: is no record of what servers were before a rollout: {error}") from error


def _remove(file: Path) -> None:
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        raise HookFailed(f"{file}: {error.strerror}") from error


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
