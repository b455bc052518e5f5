"""Decides which files of a path make the checkpoint, and says of every other shard why it is left out.

In this order: one file that is named; the set of an index; ``model.safetensors``; a complete
set of ``NAME-NNNNN-of-NNNNN`` shards; whatever ``.safetensors`` files there are, if no tensor
is in two of them (checked once their headers are read). Only regular files are shards.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from remote_agent.loader.files import describe, is_directory, kind_of, refused
from remote_agent.loader.index import INDEX_SUFFIX, read_index
from remote_agent.loader.problems import CheckpointProblem, counted, listed, shown

SUFFIX = ".safetensors"
DEFAULT_INDEX = f"model{INDEX_SUFFIX}"
DEFAULT_FILE = f"model{SUFFIX}"
SHARD_COUNT_LIMIT = 100_000
SHARDS_NAMED = 20
"""How many missing shards are spelled out."""

_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{1,9})-of-(?P<count>\d{1,9})\.safetensors")
_BESIDE = re.compile(r"adapter_model.*\.safetensors|consolidated.*\.safetensors|optimizer.*\.safetensors")
"""Files that lie beside a model's own weights and hold something else, or the same again."""

_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")


@dataclass(frozen=True)
class Ignored:
    """A file that looks like a shard and is not loaded."""

    file: str
    reason: str


@dataclass(frozen=True)
class Selection:
    """Files to load, relative to ``root``. ``index`` names the tensors that an index puts in each."""

    root: Path
    files: tuple[str, ...]
    ignored: tuple[Ignored, ...] = ()
    index: Mapping[str, tuple[str, ...]] | None = None
    problems: tuple[CheckpointProblem, ...] = field(default=())


def select(path: Path) -> Selection:
    """Return what to load of a directory, a ``.safetensors`` file or an index.

    Raises: CheckpointError if that can't be told.
    """
    is_folder = is_directory(path)
    if path.name.endswith(INDEX_SUFFIX) and not is_folder:
        return _of_index(path, _listing(path.parent))
    if not is_folder:
        return Selection(path.parent, (path.name,))
    listing = _listing(path)
    index = _choose_index(path, listing)
    return _of_index(index, listing) if index is not None else _without_index(path, listing)


@dataclass(frozen=True)
class _Listing:
    """``shards``: names with the suffix that may be files (links included). ``odd``: what else has it, and why not."""

    names: frozenset[str]
    shards: tuple[str, ...]
    odd: tuple[Ignored, ...]


def _listing(root: Path) -> _Listing:
    names, shards, odd = set(), [], []
    try:
        for entry in os.scandir(root):
            names.add(entry.name)
            if not entry.name.endswith(SUFFIX):
                continue
            kind = _odd_kind(entry)
            if kind is None:
                shards.append(entry.name)
            else:
                odd.append(Ignored(entry.name, f"is {kind}, not a file"))
    except OSError as error:
        code = "not_found" if isinstance(error, FileNotFoundError) else "unreadable"
        problem = CheckpointProblem(code, root.name, None, f"directory can't be read: {describe(error)}")
        raise refused(problem) from error
    return _Listing(frozenset(names), tuple(sorted(shards)), tuple(sorted(odd, key=lambda item: item.file)))


def _odd_kind(entry: os.DirEntry[str]) -> str | None:
    """Return what an entry is instead of a file; a link that leads nowhere is left to whoever opens it."""
    try:
        mode = entry.stat().st_mode
    except OSError:
        return None
    return None if stat.S_ISREG(mode) else kind_of(mode)


def _choose_index(root: Path, listing: _Listing) -> Path | None:
    indexes = sorted(name for name in listing.names if name.endswith(INDEX_SUFFIX))
    if DEFAULT_INDEX in indexes:
        return root / DEFAULT_INDEX
    if len(indexes) > 1:
        detail = f"holds {len(indexes)} indexes and none is {DEFAULT_INDEX}: name one of {listed(indexes)}"
        raise refused(CheckpointProblem("ambiguous", None, None, detail))
    return root / indexes[0] if indexes else None


def _of_index(index: Path, listing: _Listing) -> Selection:
    shards = read_index(index)
    problems = []
    present = []
    odd = {item.file for item in listing.odd}
    for shard, tensors in sorted(shards.items()):
        if (shard in listing.names and shard not in odd) or ("/" in shard and os.path.lexists(index.parent / shard)):
            present.append(shard)
            continue
        what = "is not a file" if shard in odd else "is not there"
        detail = f"{what}, and {index.name} puts {counted(len(tensors), 'tensor')} in it: {listed(tensors)}"
        problems.append(CheckpointProblem("missing_shard", shard, tensors[0], detail))
    others = [name for name in listing.shards if name not in shards]
    ignored = _ignore(others, f"not in {index.name}")
    return Selection(index.parent, tuple(present), (*ignored, *listing.odd), shards, tuple(problems))


def _without_index(root: Path, listing: _Listing) -> Selection:
    names = listing.shards
    if not names:
        raise refused(_nothing(root, listing))
    if DEFAULT_FILE in names:
        chosen: tuple[str, ...] = (DEFAULT_FILE,)
        return Selection(root, chosen, (*_ignore(_rest(names, chosen), f"{DEFAULT_FILE} is there"), *listing.odd))
    groups = _shard_groups(names)
    if groups:
        return _of_group(root, listing, groups)
    own = tuple(name for name in names if not _BESIDE.fullmatch(name)) or names
    return Selection(root, own, (*_ignore(_rest(names, own), "not the model's own weights"), *listing.odd))


def _shard_groups(names: Iterable[str]) -> dict[tuple[str, int], dict[int, str]]:
    groups: dict[tuple[str, int], dict[int, str]] = {}
    for name in names:
        match = _SHARD.fullmatch(name)
        if match:
            groups.setdefault((match["stem"], int(match["count"])), {})[int(match["number"])] = name
    return groups


def _of_group(root: Path, listing: _Listing, groups: dict[tuple[str, int], dict[int, str]]) -> Selection:
    keys = [key for key in groups if key[0] == "model"] or list(groups)
    if len(keys) > 1:
        sets = listed(f"{stem}-*-of-{count}" for stem, count in keys)
        detail = f"holds {len(keys)} sets of shards and no index: {sets}; add the index, or keep one set"
        raise refused(CheckpointProblem("ambiguous", None, None, detail))
    (stem, count), members = keys[0], groups[keys[0]]
    chosen = tuple(members[number] for number in sorted(members))
    ignored = _ignore(_rest(listing.shards, chosen), f"not in the set {stem}-*-of-{count}")
    problems = tuple(_missing_of_group(stem, count, members))
    return Selection(root, chosen, (*ignored, *listing.odd), None, problems)


def _missing_of_group(stem: str, count: int, members: Mapping[int, str]) -> Iterator[CheckpointProblem]:
    first = members[min(members)]
    if not max(members) <= count <= SHARD_COUNT_LIMIT or min(members) < 1:
        yield CheckpointProblem("missing_shard", first, None, f"counts {count} shards in its name, which can't be")
        return
    match = _SHARD.fullmatch(first)
    widths = (len(match["number"]), len(match["count"])) if match else (5, 5)
    missing = [number for number in range(1, count + 1) if number not in members]
    for number in missing[:SHARDS_NAMED]:
        name = f"{stem}-{number:0{widths[0]}d}-of-{count:0{widths[1]}d}{SUFFIX}"
        detail = f"is not there: {len(members)} of {count} shards are, and there is no index"
        yield CheckpointProblem("missing_shard", name, None, detail)
    if len(missing) > SHARDS_NAMED:
        detail = f"{len(missing) - SHARDS_NAMED} more of {count} shards are not there"
        yield CheckpointProblem("missing_shard", None, None, detail)


def _nothing(root: Path, listing: _Listing) -> CheckpointProblem:
    others = sorted(name for name in listing.names if name.endswith(_OTHER_WEIGHTS))
    caches = sorted(name for name in listing.names if name.startswith("models--"))
    detail = f"holds no {SUFFIX} file: {shown(str(root), 400)}"
    if others:
        detail += f"; it has {listed(others, 5)}, which must be converted to safetensors first"
    elif caches:
        detail += f"; it holds caches of models: point at one of {listed(caches, 5)}"
    elif listing.odd:
        detail += f"; {listed(item.file for item in listing.odd)} is not a file"
    return CheckpointProblem("no_safetensors", None, None, detail)


def _rest(names: Iterable[str], chosen: tuple[str, ...]) -> list[str]:
    return [name for name in names if name not in chosen]


def _ignore(names: Iterable[str], reason: str) -> tuple[Ignored, ...]:
    return tuple(Ignored(name, reason) for name in names)
