"""What stayed in the page cache is measured after it was read, and said with its numbers."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from remote_agent.errors import LoadError, StageError
from remote_agent.loader import read_ahead
from remote_agent.loader.checkpoint import Checkpoint, inspect
from remote_agent.loader.residency import RangeResidency, Residency, measure_residency
from remote_agent.loader.shards import OpenShards
from remote_agent.pagecache import reading, stage
from remote_agent.pagecache.reading import bring_in
from remote_agent.pipeline.timing import Measure
from tests.remote_agent.loader.caches_by_hand import drop_from_cache
from tests.remote_agent.pagecache.cachers import write_checkpoint


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return inspect(write_checkpoint(tmp_path / "model"))


def told(monkeypatch: pytest.MonkeyPatch, found: Residency) -> None:
    monkeypatch.setattr(stage, "measure_residency", lambda headers: found)


def test_what_did_not_stay_is_a_finding(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """A little missing is still the tier; it is named to the byte."""
    told(monkeypatch, Residency(7800))
    measure = Measure(0)

    finding = stage.check_stay(checkpoint, measure)

    assert finding is not None
    assert (finding.code, finding.severity) == ("not_all_cached", "warning")
    assert finding.text == "200 bytes of 8000 bytes did not stay in the page cache"
    assert measure.extra["stayed_bytes"] == 7800


def test_too_little_that_stayed_fails_the_run(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier that was not reached is not called reached."""
    told(monkeypatch, Residency(4000, "mincore"))

    with pytest.raises(StageError) as failed:
        stage.check_stay(checkpoint, Measure(0))

    assert failed.value.failure.code == "not_cached"
    assert failed.value.failure.detail.startswith("4000 bytes of 8000 bytes did not stay in the page cache (mincore)")


def test_what_nobody_can_tell_is_said_to_be_unknown(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a success nor a failure is made of it."""
    told(monkeypatch, Residency(None, "unknown", "cached pages can't be asked for"))
    measure = Measure(0)

    finding = stage.check_stay(checkpoint, measure)

    assert finding is not None
    assert (finding.code, finding.severity) == ("stay_unknown", "info")
    assert "cached pages can't be asked for" in finding.text
    assert "stayed_bytes" not in measure.extra


def test_a_file_cut_while_it_is_read_is_named_and_every_reader_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several readers, one of which meets the end of a file that was longer."""
    folder = write_checkpoint(tmp_path / "large", 1_000_000)
    checkpoint = inspect(folder)
    monkeypatch.setattr(reading, "BLOCK_BYTES", 4096)
    monkeypatch.setattr(reading, "measure_ranges", lambda header, descriptor: RangeResidency((0.0,), "told"))

    def cut(done: int, total: int) -> None:
        os.truncate(folder / "b.safetensors", 8192)

    def read() -> None:
        with OpenShards(checkpoint.shards) as shards:
            bring_in(checkpoint, shards, cut)
            shards.check_unchanged()

    with pytest.raises(LoadError, match=r"b\.safetensors: changed since it was checked: size 4"):
        read()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("cache-reader")]


def test_where_files_are_not_mapped_they_are_read(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same pages get there by another call."""
    for header in checkpoint.shards:
        drop_from_cache(header.path)

    def refuse(*arguments: object) -> None:
        raise OSError(19, os.strerror(19))

    monkeypatch.setattr(read_ahead, "FileMap", refuse)
    monkeypatch.setattr(reading, "measure_ranges", lambda header, descriptor: RangeResidency((0.0,), "told"))
    with OpenShards(checkpoint.shards) as shards:
        brought = bring_in(checkpoint, shards, lambda done, total: None)

    assert (brought.cached_bytes, brought.read_bytes) == (0, 8000)
    assert measure_residency(checkpoint.shards).cached_bytes == 8000
