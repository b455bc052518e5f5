"""The process of a ``cached`` run: what it reads, what it locks, and how it ends. Without torch."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from remote_agent.loader.checkpoint import inspect
from remote_agent.loader.residency import measure_residency
from remote_agent.protocol.internal import (
    WorkerFailed,
    WorkerFinding,
    WorkerLetsGo,
    WorkerReady,
    WorkerRelease,
)
from remote_agent.protocol.messages import StageStatus, Tier
from tests.remote_agent.loader.caches_by_hand import drop_from_cache
from tests.remote_agent.pagecache.cachers import LIMIT_BYTES, do_cached, locked_by, running_cacher, write_checkpoint
from tests.remote_agent.worker_ends import only, stages_over


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


def test_shards_are_read_into_the_page_cache_and_the_process_holds_nothing(tmp_path: Path, log: Path) -> None:
    """What was missing is counted apart from what was there; all of it is there afterwards; no other stage is done."""
    folder = write_checkpoint(tmp_path / "large", 1_000_000)
    checkpoint = inspect(folder)
    drop_from_cache(folder / "a.safetensors")
    with running_cacher(log) as (process, end):
        messages = do_cached(end, folder)
        end.send(WorkerRelease())
        assert process.wait(30) == 0, log.read_text()

    ready, weights = only(messages, WorkerReady), stages_over(messages)["weights"]
    assert (ready.tier, ready.is_held, ready.first_output_mono_ns) == (Tier.CACHED, False, None)
    assert stages_over(messages).keys() == {"weights"}
    assert (weights.status, weights.path) == (StageStatus.DONE, "page cache")
    assert (weights.bytes, weights.extra["cached_bytes"]) == (4_000_000, 4_000_000)
    assert weights.extra["stayed_bytes"] == checkpoint.bytes
    assert weights.rate_bytes_s
    assert measure_residency(checkpoint.shards).cached_bytes == checkpoint.bytes


def test_what_is_cached_already_is_not_read(folder: Path, log: Path) -> None:
    """The stage is reused and says so; nothing has a rate where nothing moved."""
    with running_cacher(log) as (_, end):
        weights = stages_over(do_cached(end, folder))["weights"]

    assert (weights.status, weights.bytes, weights.rate_bytes_s) == (StageStatus.REUSED, 0, None)
    assert weights.reason == "the page cache has it"


def test_pages_are_locked_within_the_limit_until_it_is_let_go(folder: Path, log: Path) -> None:
    """The kernel counts what the message says; a second job finds it locked; without the process it is not."""
    with running_cacher(log) as (process, end):
        messages = do_cached(end, folder, lock=True)
        ready = only(messages, WorkerReady)
        assert locked_by(process.pid) == ready.bytes == 8192
        again = do_cached(end, folder, lock=True)
        assert locked_by(process.pid) == ready.bytes
        end.send(WorkerRelease())
        assert process.wait(30) == 0, log.read_text()

    assert (ready.tier, ready.is_held) == (Tier.CACHED, True)
    assert stages_over(messages)["hold"].bytes == ready.bytes
    assert {name: stage.status for name, stage in stages_over(again).items()} == dict.fromkeys(
        ("weights", "hold"), StageStatus.REUSED
    )
    assert only(again, WorkerReady) == ready


def test_more_than_may_be_locked_is_refused_with_the_numbers_and_cached_all_the_same(tmp_path: Path, log: Path) -> None:
    """Limit, need and the capability are named; nothing is locked and nobody holds anything."""
    folder = write_checkpoint(tmp_path / "large", 20_000)
    with running_cacher(log) as (process, end):
        messages = do_cached(end, folder, lock=True)
        assert locked_by(process.pid) == 0

    finding, ready = only(messages, WorkerFinding).finding, only(messages, WorkerReady)
    assert (finding.code, finding.severity) == ("not_locked", "warning")
    assert "163840 bytes would be locked: RLIMIT_MEMLOCK lets this process lock 65536 bytes" in finding.text
    assert "CAP_IPC_LOCK" in finding.text
    assert (ready.tier, ready.is_held) == (Tier.CACHED, False)
    assert stages_over(messages)["hold"].reason == f"not locked: {finding.text}"
    assert LIMIT_BYTES == 65536


def test_a_locked_file_that_is_cut_ends_the_holder_with_the_reason(folder: Path, log: Path) -> None:
    """Its pages are gone whoever locked them; the process touches none, so no signal comes of it."""
    with running_cacher(log) as (process, end):
        only(do_cached(end, folder, lock=True), WorkerReady)
        os.truncate(folder / "b.safetensors", 100)
        last = end.receive_until(WorkerLetsGo)[-1]
        assert process.wait(30) == 0, log.read_text()

    assert isinstance(last, WorkerLetsGo)
    assert "b.safetensors: changed since it was checked: size 4" in last.reason


def test_a_file_that_is_no_longer_the_one_checked_fails_the_run(folder: Path, log: Path) -> None:
    """The message names the file and what about it is different."""
    before = inspect(folder).identities
    (folder / "a.safetensors").touch()
    with running_cacher(log) as (process, end):
        failure = only(do_cached(end, folder, shards=before), WorkerFailed).failure
        assert process.wait(30) == 0

    assert (failure.code, failure.stage) == ("changed", "weights")
    assert "a.safetensors: changed since it was checked: modification time" in failure.detail


def test_it_ends_with_its_socket(folder: Path, log: Path) -> None:
    """As every holder does: an agent that died finds no memory locked by a process it does not know."""
    with running_cacher(log) as (process, end):
        only(do_cached(end, folder, lock=True), WorkerReady)
        end.sock.close()
        assert process.wait(30) != 0
