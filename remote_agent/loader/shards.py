"""The open files of a load, held against what they were before the first and after the last byte."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType

from remote_agent.errors import CheckpointError, LoadError
from remote_agent.loader.cleanup import finally_do
from remote_agent.loader.files import describe, identity_of, open_regular, read_into
from remote_agent.loader.headers import Header
from remote_agent.loader.problems import shown
from remote_agent.loader.read_ahead import ReadAhead
from remote_agent.protocol.internal import ShardIdentity

_FIELDS = (
    ("device", "device"),
    ("inode", "inode"),
    ("size_bytes", "size"),
    ("mtime_ns", "modification time"),
    ("ctime_ns", "change time"),
)


class OpenShards:
    """Every shard open for reading; closed on exit, whatever happens.

    Raises: LoadError (``changed``) if a shard is not what its header, or the caller, says it was.
    """

    def __init__(self, headers: Sequence[Header], expected: Sequence[ShardIdentity] = ()) -> None:
        self._headers = headers
        self.descriptors: list[int] = []
        self.ahead = ReadAhead(self.descriptors, [header.size_bytes for header in headers])
        known = {identity.path: identity for identity in expected}
        try:
            for header in headers:
                if known:
                    _compare(header, header.identity, _known(known, header))
                self.descriptors.append(_open(header.path))
                self.check(len(self.descriptors) - 1)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> OpenShards:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Wait for what is being read ahead and close every file. Raises: OSError"""
        closing = [partial(os.close, descriptor) for descriptor in self.descriptors]
        with finally_do(self.ahead.close, self.descriptors.clear, *closing):
            pass

    def read(self, shard: int, offset: int, view: memoryview) -> None:
        """Fill ``view`` from ``offset`` of the data section; may be called from any thread.

        Raises: LoadError naming the file and the place.
        """
        header = self._headers[shard]
        try:
            got = read_into(self.descriptors[shard], header.data_start + offset, view)
        except OSError as error:
            raise self.unreadable(shard, header.data_start + offset, error) from error
        if got < len(view):
            raise self.ended_early(shard, header.data_start + offset + got)

    def unreadable(self, shard: int, place: int, error: OSError) -> LoadError:
        """Return the error of a shard that can't be read at byte ``place`` of the file."""
        name = _name(self._headers[shard])
        return LoadError(f"{name}: can't be read at byte {place}: {describe(error)}", "unreadable")

    def ended_early(self, shard: int, place: int) -> LoadError:
        """Return the error of a shard that ends at byte ``place`` of the file: that it changed, if it did."""
        try:
            self.check(shard)
        except LoadError as change:
            return change
        header = self._headers[shard]
        return LoadError(f"{_name(header)}: ended at byte {place} of {header.size_bytes}", "short_read")

    def check_unchanged(self) -> None:
        """Compare every shard, by descriptor and by name, with what it was. Raises: LoadError (``changed``)."""
        for shard, header in enumerate(self._headers):
            self.check(shard)
            try:
                status = header.path.stat()
            except OSError as error:
                text = f"{_name(header)}: went away during the load: {describe(error)}"
                raise LoadError(text, "changed") from error
            _compare(header, identity_of(header.identity.path, status), header.identity)

    def check(self, shard: int) -> None:
        """Compare one shard, by descriptor, with what it was. Raises: LoadError (``changed``)."""
        header = self._headers[shard]
        now = identity_of(header.identity.path, os.fstat(self.descriptors[shard]))
        _compare(header, now, header.identity)


def _open(path: Path) -> int:
    try:
        return open_regular(path)
    except CheckpointError as error:
        raise LoadError(str(error), "changed") from error


def _known(known: Mapping[str, ShardIdentity], header: Header) -> ShardIdentity:
    identity = known.get(header.identity.path)
    if identity is None:
        raise LoadError(f"{_name(header)}: was not among the files that preflight checked", "changed")
    return identity


def _compare(header: Header, now: ShardIdentity, before: ShardIdentity) -> None:
    changes = [
        f"{words} {getattr(before, name)} is now {getattr(now, name)}"
        for name, words in _FIELDS
        if getattr(now, name) != getattr(before, name)
    ]
    if changes:
        raise LoadError(f"{_name(header)}: changed since it was checked: {', '.join(changes)}", "changed")


def _name(header: Header) -> str:
    return shown(str(header.path), 400)
