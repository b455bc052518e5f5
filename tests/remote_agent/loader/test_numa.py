"""Threads are bound to the GPU's node only where there is a choice and the process may take it."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from remote_agent.loader.numa import bind_thread, bound_thread, processors_near
from tests.remote_agent.fake_cuda import FakeGpu, FakeRuntime

BUS_ID = "0000:1B:00.0"


def write_host(root: Path, lists: list[str], node: str) -> Path:
    for number, processors in enumerate(lists):
        folder = root / f"devices/system/node/node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(processors + "\n")
    device = root / "bus/pci/devices" / BUS_ID.lower()
    device.mkdir(parents=True)
    (device / "numa_node").write_text(node + "\n")
    return root


def test_the_gpus_own_node_is_chosen_within_what_the_process_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two nodes the GPU's counts, and of its processors those that a container leaves."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 5, 6, 9})
    host = write_host(tmp_path, ["0-3,8-11", "4-7,12-15"], "1")

    assert processors_near(BUS_ID, host) == {5, 6}


@pytest.mark.parametrize(
    ("lists", "node"),
    [(["0-63"], "0"), (["0-3", "4-7"], "-1"), (["0-3", "4000-4003"], "1"), (["0-3", "nonsense"], "1")],
)
def test_there_is_no_choice(tmp_path: Path, lists: list[str], node: str) -> None:
    """One node, an unknown one, one out of reach and one that can't be read bind nobody."""
    assert processors_near(BUS_ID, write_host(tmp_path, lists, node)) is None
    assert processors_near("0000:99:00.0", tmp_path) is None


def test_only_the_thread_itself_is_bound() -> None:
    """A reader's own thread runs on the chosen processors; others keep theirs, and a bound block ends."""
    before = os.sched_getaffinity(0)
    one = frozenset(list(before)[:1])
    seen: list[set[int]] = []

    def body() -> None:
        bind_thread(one)
        seen.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    with bound_thread(one):
        seen.append(os.sched_getaffinity(0))

    assert seen == [set(one), set(one)]
    assert os.sched_getaffinity(0) == before
    bind_thread(frozenset({100_000}))  # taken away meanwhile
    assert os.sched_getaffinity(0) == before


def test_a_ring_knows_the_processors_near_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bus address comes from the runtime, without what follows its end."""
    asked: list[str] = []
    monkeypatch.setattr("remote_agent.loader.ring.processors_near", lambda bus_id: asked.append(bus_id))
    gpu = FakeGpu(FakeRuntime())
    gpu.open_context()

    assert asked == ["0000:1b:00.0"]
    gpu.close()
