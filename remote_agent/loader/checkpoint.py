"""Inspects a checkpoint as a whole: which files it is, whether they agree, what loading it means.

Reads headers and the index, never a tensor's bytes, and touches no device.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from remote_agent.errors import CheckpointError
from remote_agent.loader.files import identity_of
from remote_agent.loader.headers import Header, TensorEntry, read_header
from remote_agent.loader.hub import resolve_snapshot
from remote_agent.loader.problems import CheckpointProblem, counted, listed, shown
from remote_agent.loader.selection import Ignored, Selection, select
from remote_agent.loader.spread import spread
from remote_agent.protocol.internal import ShardIdentity

__all__ = ["Checkpoint", "CheckpointProblem", "Examination", "Ignored", "examine", "inspect"]


TENSORS_NAMED = 20


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that can be loaded. ``bytes`` and ``tensors`` count each tensor once.

    ``shadowed``: positions (shard, tensor) of copies that the index does not mean.
    """

    root: Path
    shards: tuple[Header, ...]
    ignored: tuple[Ignored, ...]
    bytes: int
    tensors: int
    shadowed: frozenset[tuple[int, str]] = frozenset()

    @property
    def identities(self) -> tuple[ShardIdentity, ...]:
        return tuple(header.identity for header in self.shards)

    def entries(self) -> Iterator[tuple[Header, TensorEntry]]:
        """Yield every tensor that is to be loaded, in the order of the files."""
        for index, header in enumerate(self.shards):
            for entry in header.tensors:
                if (index, entry.name) not in self.shadowed:
                    yield header, entry


@dataclass(frozen=True)
class Examination:
    """What ``preflight`` answers. On a refusal ``bytes`` and ``tensors`` count what could be read."""

    verdict: Literal["ok", "refused"]
    shards: tuple[str, ...]
    ignored: tuple[Ignored, ...]
    bytes: int
    tensors: int
    problems: tuple[CheckpointProblem, ...]
    checkpoint: Checkpoint | None = None

    def as_dict(self) -> dict[str, object]:
        """Return the fields of ``preflight --json``."""
        return {
            "verdict": self.verdict,
            "shards": list(self.shards),
            "ignored": [dataclasses.asdict(item) for item in self.ignored],
            "bytes": self.bytes,
            "tensors": self.tensors,
            "problems": [dataclasses.asdict(problem) for problem in self.problems],
        }


def inspect(path: Path, revision: str | None = None, known: Iterable[Header] = ()) -> Checkpoint:
    """Return the checkpoint at ``path``: a directory, a file, an index, or a Hugging Face cache directory.

    A file that has not changed since its header, among ``known``, was read is not read again.
    Raises: CheckpointError with every problem.
    """
    examination = examine(path, revision, known)
    if examination.checkpoint is None:
        text = "; ".join(str(problem) for problem in examination.problems)
        raise CheckpointError(text, examination.problems)
    return examination.checkpoint


def examine(path: Path, revision: str | None = None, known: Iterable[Header] = ()) -> Examination:
    """Return what is at ``path`` and everything that is wrong with it; never raises for a bad checkpoint.

    ``known`` is what `inspect` takes.
    """
    try:
        selection = select(resolve_snapshot(path, revision))
    except CheckpointError as error:
        return Examination("refused", (), (), 0, 0, error.problems)
    headers, problems = _read_headers(selection, {header.identity: header for header in known})
    problems = [*selection.problems, *problems]
    found = [header for header in headers if header is not None]
    shadowed: frozenset[tuple[int, str]] = frozenset()
    notes: tuple[Ignored, ...] = ()
    if not problems:
        shadowed, notes, problems = _compare(selection, found)
    checkpoint = Checkpoint(selection.root, tuple(found), (*selection.ignored, *notes), 0, 0, shadowed)
    sizes = [entry.nbytes for _, entry in checkpoint.entries()]
    checkpoint = dataclasses.replace(checkpoint, bytes=sum(sizes), tensors=len(sizes))
    return Examination(
        "refused" if problems else "ok",
        selection.files,
        checkpoint.ignored,
        checkpoint.bytes,
        checkpoint.tensors,
        tuple(problems),
        None if problems else checkpoint,
    )


def _read_headers(
    selection: Selection, known: Mapping[ShardIdentity, Header]
) -> tuple[list[Header | None], list[CheckpointProblem]]:
    def read(name: str) -> Header | tuple[CheckpointProblem, ...]:
        path = selection.root / name
        try:
            return _find_known(path, known) or read_header(path, name)
        except CheckpointError as error:
            return error.problems

    results = spread(read, selection.files, "header")
    headers = [result if isinstance(result, Header) else None for result in results]
    return headers, [problem for result in results if not isinstance(result, Header) for problem in result]


def _find_known(path: Path, known: Mapping[ShardIdentity, Header]) -> Header | None:
    if not known:
        return None
    try:
        return known.get(identity_of(str(path.absolute()), path.stat()))
    except OSError:
        return None  # `read_header` says why


def _compare(
    selection: Selection, headers: Sequence[Header]
) -> tuple[frozenset[tuple[int, str]], tuple[Ignored, ...], list[CheckpointProblem]]:
    """Hold the headers against each other and against the index."""
    places: dict[str, list[int]] = defaultdict(list)
    for position, header in enumerate(headers):
        for entry in header.tensors:
            places[entry.name].append(position)
    meant: dict[str, int] = {}
    problems = []
    if selection.index is not None:
        numbers = {name: position for position, name in enumerate(selection.files)}
        meant = {tensor: numbers[shard] for shard, tensors in selection.index.items() for tensor in tensors}
        problems = _hold_against_index(selection.files, meant, places)
    twice = {tensor: where for tensor, where in places.items() if len(where) > 1}
    unclear = {tensor: where for tensor, where in twice.items() if tensor not in meant}
    problems += _name_duplicates(selection.files, unclear)
    shadowed = frozenset(
        (position, tensor)
        for tensor, where in twice.items()
        if tensor in meant
        for position in where
        if position != meant[tensor]
    )
    notes = tuple(
        Ignored(selection.files[position], f"its copy of {shown(tensor)} is not the one the index names")
        for position, tensor in sorted(shadowed)[:TENSORS_NAMED]
    )
    return shadowed, notes, problems


def _hold_against_index(
    files: Sequence[str], meant: Mapping[str, int], places: Mapping[str, list[int]]
) -> list[CheckpointProblem]:
    missing: dict[int, list[str]] = defaultdict(list)
    elsewhere: dict[tuple[int, int], list[str]] = defaultdict(list)
    for tensor, position in meant.items():
        where = places.get(tensor)
        if not where:
            missing[position].append(tensor)
        elif position not in where:
            elsewhere[position, where[0]].append(tensor)
    problems = [
        CheckpointProblem(
            "missing_tensor",
            files[position],
            tensors[0],
            f"does not hold {counted(len(tensors), 'tensor')} that the index puts in it: {listed(tensors)}",
        )
        for position, tensors in missing.items()
    ]
    for (position, actual), tensors in elsewhere.items():
        detail = (
            f"does not hold {counted(len(tensors), 'tensor')} that the index puts in it, "
            f"{shown(files[actual])} does: {listed(tensors)}"
        )
        problems.append(CheckpointProblem("wrong_shard", files[position], tensors[0], detail))
    return problems


def _name_duplicates(files: Sequence[str], twice: Mapping[str, list[int]]) -> list[CheckpointProblem]:
    by_files: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for tensor, where in twice.items():
        by_files[tuple(where)].append(tensor)
    return [
        CheckpointProblem(
            "duplicate_tensor",
            files[where[0]],
            tensors[0],
            f"holds {counted(len(tensors), 'tensor')} that {listed(files[other] for other in where[1:])} holds too, "
            f"and no index says which is meant: {listed(tensors)}; name one file, or add the index",
        )
        for where, tensors in by_files.items()
    ]
