"""A cache's worth is judged by what was counted, and a miss names what changed."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from remote_agent.compile_records import find_damaged, read_records
from remote_agent.pipeline.compile_attempt import COUNTERS
from remote_agent.pipeline.compile_cache import CompileCache, judge_cache
from remote_agent.pipeline.shared_layer import LayerFunctions

KEY = {"torch": "2.11.0", "driver": "570.1", "config.num_hidden_layers": "32"}

NOTHING = dict.fromkeys((*COUNTERS, "functions_loaded", "functions_traced"), 0)
FOUND = {**NOTHING, "fxgraph_cache_hit": 2}
BUILT = {**NOTHING, "functions_traced": 2}


def build(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"object")


def warm_up(root: Path, key: dict[str, str], *names: str) -> str:
    """Do a warm-up with ``key`` that builds the objects ``names``, and return what is said of the cache."""
    cache = CompileCache(root, key)
    build(root, *names)
    verdict, reason, _ = cache.judge(BUILT if names else FOUND)
    cache.keep(LayerFunctions(), verdict)
    return reason


@pytest.mark.parametrize(
    ("counts", "artefacts", "new", "verdict"),
    [
        ({"fxgraph_cache_hit": 2}, 5, 0, "hit"),
        ({"fxgraph_cache_hit": 2}, 5, 1, "partial"),
        ({"fxgraph_cache_hit": 2, "fxgraph_cache_bypass": 1}, 5, 0, "partial"),
        ({"fxgraph_cache_hit": 2, "fxgraph_cache_miss": 1}, 5, 0, "partial"),
        ({"fxgraph_cache_hit": 2, "fxgraph_cache_miss": 1}, 0, 3, "miss"),
        ({"fxgraph_cache_miss": 1}, 5, 3, "miss"),
        ({"functions_loaded": 2}, 0, 0, "hit"),
        ({"functions_loaded": 2}, 5, 1, "partial"),
        ({"functions_loaded": 2, "functions_traced": 1}, 5, 0, "partial"),
        ({"functions_traced": 2}, 5, 0, "miss"),
        ({"functions_traced": 2, "fxgraph_cache_hit": 2}, 5, 0, "partial"),
        ({}, 0, 0, "miss"),
    ],
)
def test_a_hit_is_claimed_only_when_nothing_was_built(
    counts: dict[str, int], artefacts: int, new: int, verdict: str
) -> None:
    """Every look-up must have hit, nothing may have been traced, and no new object may have appeared."""
    found, reason = judge_cache({**NOTHING, **counts}, artefacts, new, "the reason")

    assert found == verdict
    assert ("the reason" in reason) == (verdict != "hit")


def test_the_first_miss_says_that_the_cache_was_empty(tmp_path: Path) -> None:
    """And how much was built."""
    reason = warm_up(tmp_path, KEY, "inductor/a.so", "triton/b.cubin")

    assert reason == "cache miss: the cache was empty; 2 graphs compiled and 0 found, 2 new objects"
    (record,) = read_records(tmp_path)
    assert record.key == KEY
    assert {file.path: file.size_bytes for file in record.objects} == {"inductor/a.so": 6, "triton/b.cubin": 6}


def test_a_miss_names_what_changed_against_the_nearest_record(tmp_path: Path) -> None:
    """Not against the last."""
    warm_up(tmp_path, KEY, "inductor/a.so")
    warm_up(tmp_path, {"torch": "1", "gpu": "another"}, "inductor/b.so")

    reason = warm_up(tmp_path, {**KEY, "torch": "2.13.0", "config.num_hidden_layers": "40"}, "inductor/c.so")

    assert reason.startswith("cache miss: torch 2.11.0 → 2.13.0, num_hidden_layers 32 → 40; 2 graphs compiled")


def test_a_miss_under_an_equal_key_says_what_is_gone(tmp_path: Path) -> None:
    """Objects that are built anew stay part of the record, beside those that were still there."""
    warm_up(tmp_path, KEY, *(f"inductor/{number}.so" for number in range(12)))
    for number in range(3):
        (tmp_path / f"inductor/{number}.so").unlink()

    reason = warm_up(tmp_path, KEY, *(f"inductor/{number}.so" for number in range(3)))

    assert reason.startswith("cache miss: 3 of its 12 objects are gone; ")
    assert len(read_records(tmp_path)[0].objects) == 12


def test_a_miss_without_a_known_cause_says_so(tmp_path: Path) -> None:
    """Nothing is made up."""
    warm_up(tmp_path, KEY, "inductor/a.so")

    assert warm_up(tmp_path, KEY, "inductor/b.so").startswith("cache miss: nothing known changed; ")


def test_objects_of_unknown_origin_are_told_from_an_empty_cache(tmp_path: Path) -> None:
    """Somebody else's, or those of a warm-up that was cut off."""
    build(tmp_path, "inductor/a.so", "inductor/b.so")

    reason = warm_up(tmp_path, KEY, "inductor/c.so")

    assert reason.startswith("cache miss: no complete warm-up is recorded for its 2 objects; ")


def test_a_hit_leaves_the_record_as_it_is(tmp_path: Path) -> None:
    """It is only marked as used."""
    warm_up(tmp_path, KEY, "inductor/a.so")
    (before,) = read_records(tmp_path)

    assert warm_up(tmp_path, KEY) == "cache hit: 2 graphs found, none compiled"
    assert read_records(tmp_path) == (before,)


def test_a_hit_under_a_new_key_is_recorded(tmp_path: Path) -> None:
    """Another shape may be served by the same objects; its warm-up was complete too."""
    warm_up(tmp_path, KEY, "inductor/a.so")

    assert warm_up(tmp_path, {**KEY, "shapes": "1x4"}) == "cache hit: 2 graphs found, none compiled"
    assert len(read_records(tmp_path)) == 2


class OneFunction(LayerFunctions):
    """Has one function to save, of a content that is known."""

    def save(self, folder: Path) -> tuple[Path, ...]:
        path = folder / "0.new"
        path.write_bytes(b"a compiled function")
        return (path,)


def test_what_is_in_its_place_counts_though_a_server_is_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network filesystem refuses to remove the folder that a function came from, and forgets each file once."""
    remove, open_file, refused = os.rmdir, Path.open, set[str]()

    def late_rmdir(path: str, *arguments: Any, **options: Any) -> None:
        if Path(path).name.startswith("."):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), path)
        remove(path, *arguments, **options)

    def stale_open(path: Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if path.is_relative_to(tmp_path) and "r" in mode and str(path) not in refused:
            refused.add(str(path))
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return open_file(path, mode, *arguments, **options)

    build(tmp_path, "a.so")
    monkeypatch.setattr(os, "rmdir", late_rmdir)
    monkeypatch.setattr(Path, "open", stale_open)
    CompileCache(tmp_path, KEY).keep(OneFunction(), "miss")
    refused.clear()
    (record,) = read_records(tmp_path)

    (function,) = record.functions
    assert find_damaged(tmp_path, record.functions) == ()
    assert len(refused) == 2
    assert (tmp_path / function.path).read_bytes() == b"a compiled function"


def test_a_file_that_stays_away_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked for twice, and no more."""
    build(tmp_path, "a.so")
    CompileCache(tmp_path, KEY).keep(OneFunction(), "miss")
    (record,) = read_records(tmp_path)
    asked = []

    def stale_open(path: Path, *arguments: Any) -> None:
        asked.append(path)
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))

    monkeypatch.setattr(Path, "open", stale_open)

    assert find_damaged(tmp_path, record.functions) == record.functions
    assert len(asked) == 2
