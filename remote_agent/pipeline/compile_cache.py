"""One warm-up's dealings with a kept compile cache: what can be taken from it, what it was worth, what is kept."""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from remote_agent import caches
from remote_agent.compile_keys import Key, choose_nearest, digest_key, list_changes, tell_changes
from remote_agent.compile_records import (
    FUNCTIONS,
    CachedFile,
    WarmUp,
    describe_files,
    find_damaged,
    find_missing,
    note_use,
    read_records,
    write_record,
)
from remote_agent.pipeline.failures import brief, one_line
from remote_agent.pipeline.shared_layer import LayerFunctions

LOG = logging.getLogger(__name__)

FOLDERS = (*caches.VARIABLES.values(), FUNCTIONS)
"""What a compile takes from the cache directory."""


class CompileCache:
    """The cache directory ``root`` as one warm-up with ``key`` finds it and leaves it."""

    def __init__(self, root: Path, key: Key) -> None:
        self.root, self.key = root, key
        records = read_records(root)
        self._record = next((record for record in records if record.key == key), None)
        self._before = caches.list_artefacts(root)
        self._why = self._explain(records)
        self._aside: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Nothing was there that a compile could have taken."""
        return not self._before and (self._record is None or not self._record.functions)

    def load_functions(self, functions: LayerFunctions) -> None:
        """Load the layer functions of an equal warm-up, all or none; why none is part of a miss's reason."""
        if self._record is None or not self._record.functions:
            return
        files = self._record.functions
        damaged = find_damaged(self.root, files)
        if damaged:
            self._why = f"{len(damaged)} of its {len(files)} layer functions are gone or damaged"
            return
        try:
            functions.load([self.root / file.path for file in files])
        except Exception as error:  # whatever torch raises for what it can't use any more
            self._why = f"its layer functions can't be loaded: {brief(error)}"

    def judge(self, counts: Mapping[str, int]) -> tuple[str, str, int]:
        """Return the verdict of `judge_cache`, its reason, and how many objects are new."""
        new = len(self._list_new())
        return *judge_cache(counts, len(self._before), new, self._why), new

    def keep(self, functions: LayerFunctions, verdict: str) -> None:
        """Record a complete and verified warm-up, with its layer functions. Raises: OSError, or what torch does."""
        if verdict == "hit" and self._record is not None:
            note_use(self.root, self._record)
            return
        saved = self._save(functions)
        built = {file.path: file for file in (self._record.objects if self._record is not None else ())}
        built.update({path: CachedFile(path, size) for path, size in self._list_new().items()})
        missing = find_missing(self.root, tuple(built.values()))
        objects = tuple(file for file in built.values() if file not in missing)
        write_record(self.root, WarmUp(self.key, objects, saved, int(time.time())))

    def set_aside(self, reason: str) -> None:
        """Move what a compile takes out of its sight; ``reason`` is told as the cause of the miss. Raises: OSError."""
        self._aside = caches.set_aside(self.root, FOLDERS)
        self._before, self._record = {}, None
        self._why = f"its entries are set aside in {self.root / caches.ASIDE}: {reason}"

    def put_back(self) -> None:
        """Undo `set_aside`: the entries were not to blame."""
        try:
            caches.put_back(self.root, self._aside)
        except OSError as error:
            LOG.warning("can't put the compile cache back: %s", error)

    def _save(self, functions: LayerFunctions) -> tuple[CachedFile, ...]:
        """Write the functions under the names of their own digests, so that two workers write no file twice."""
        folder = self.root / FUNCTIONS / digest_key(self.key)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        kept = []
        # What is in its place counts, though an NFS server may not let the empty folder go yet (EBUSY).
        with tempfile.TemporaryDirectory(dir=folder, prefix=".", ignore_cleanup_errors=True) as beside:
            for path in functions.save(Path(beside)):
                (written,) = describe_files(self.root, (path,))
                place = path.replace(folder / f"{written.sha256}.function")
                kept.append(replace(written, path=place.relative_to(self.root).as_posix()))
        return tuple(kept)

    def _list_new(self) -> dict[str, int]:
        now = caches.list_artefacts(self.root)
        return {path: size for path, size in now.items() if path not in self._before}

    def _explain(self, records: tuple[WarmUp, ...]) -> str:
        """Return why something will have to be compiled, in case that turns out so."""
        if self._record is not None:
            gone = find_missing(self.root, self._record.objects)
            if gone:
                return f"{len(gone)} of its {len(self._record.objects)} objects are gone"
            return "nothing known changed"
        nearest = choose_nearest(self.key, ((record.key, record) for record in records))
        if nearest is not None:
            return tell_changes(list_changes(nearest.key, self.key))
        if self._before:
            return f"no complete warm-up is recorded for its {len(self._before)} objects"
        return "the cache was empty"


def judge_cache(counts: Mapping[str, int], artefacts: int, new_artefacts: int, why: str) -> tuple[str, str]:
    """Return ``hit``, ``partial`` or ``miss``, and the reason. A hit: something was found and nothing was built.

    ``artefacts``: compiled objects in the cache before; a graph that is found because an earlier layer of the same
    run put it there is no sign of a warm cache. ``why``: what is known to have changed, told of a miss.
    """
    loaded, found = counts["functions_loaded"], counts["fxgraph_cache_hit"]
    built = counts["functions_traced"] + counts["fxgraph_cache_miss"] + counts["fxgraph_cache_bypass"]
    if built == 0 and new_artefacts == 0 and loaded + found > 0:
        told = f"{loaded} layer functions loaded, none traced" if loaded else f"{found} graphs found"
        return "hit", f"cache hit: {told}, none compiled"
    text = f"{built} graphs compiled and {loaded + found} found, {new_artefacts} new objects"
    if counts["fxgraph_cache_bypass"] > 0:
        text += f"; {counts['fxgraph_cache_bypass']} graphs can't be cached"
    kept = loaded > 0 or (found > 0 and artefacts > 0)
    return ("partial" if kept else "miss"), one_line(f"cache miss: {why}; {text}")
