"""Placement: every byte once, every tensor where views and kernels want it."""

from __future__ import annotations

from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from remote_agent.loader.checkpoint import inspect
from remote_agent.loader.plan import LARGE_TENSOR_BYTES, alignment_of, cut_segments, plan_placement
from tests.remote_agent.loader.files_by_hand import serialise, tensor, write

SHAPES = st.tuples(st.sampled_from(["U8", "BF16", "F32", "F64", "C64"]), st.integers(0, 700))
QUICK = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@QUICK
@given(shards=st.lists(st.lists(SHAPES, max_size=8), min_size=1, max_size=3), length=st.integers(1, 900))
def test_every_byte_goes_to_its_tensors_place_exactly_once(
    tmp_path: Path, shards: list[list[tuple[str, int]]], length: int
) -> None:
    """Segments and pieces cover each tensor's bytes once, aligned, without overlap."""
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    for number, sizes in enumerate(shards):
        tensors = [tensor(f"{number}.{index}", dtype, [size]) for index, (dtype, size) in enumerate(sizes)]
        write(tmp_path / f"{number}.safetensors", serialise(tensors))
    checkpoint = inspect(tmp_path)
    plan = plan_placement(checkpoint)

    moved: dict[int, tuple[int, int]] = {}
    for segment in cut_segments(checkpoint, length):
        assert 1 <= segment.length <= length
        for offset, size, target in plan.pieces(segment):
            for place in range(size):
                assert target + place not in moved
                moved[target + place] = (segment.shard, segment.offset + offset + place)
    assert len(moved) == checkpoint.bytes
    for placement in plan.placements:
        entry = placement.entry
        assert placement.target % alignment_of(entry) == 0
        assert all(moved[placement.target + i] == (placement.shard, entry.start + i) for i in range(entry.nbytes))
    assert all(target < plan.size_bytes for target in moved)


def test_well_aligned_files_move_in_one_run_a_shard(tmp_path: Path) -> None:
    """Where the file allows it nothing is odd: one run a shard, each on a 512-byte boundary."""
    for number in range(2):
        tensors = [tensor(f"{number}.{index}", "BF16", [1 << 16], index) for index in range(3)]
        write(tmp_path / f"{number}.safetensors", serialise(tensors))

    plan = plan_placement(inspect(tmp_path))

    assert [len(runs) for runs in plan.runs] == [1, 1]
    assert all(placement.target % 512 == 0 for placement in plan.placements)
    assert (plan.odd_tensors, plan.odd_bytes) == (0, 0)


def test_what_lies_behind_an_odd_tensor_is_moved_to_a_better_place(tmp_path: Path) -> None:
    """One byte in front costs one more run, not a copy of all that follows, and is counted."""
    tensors = [tensor("n", "U8", [1]), tensor("big", "F32", [LARGE_TENSOR_BYTES]), tensor("next", "F32", [8])]
    write(tmp_path / "x.safetensors", serialise(tensors))

    plan = plan_placement(inspect(tmp_path))

    assert len(plan.runs[0]) == 2
    assert (plan.odd_tensors, plan.odd_bytes) == (1, 4 * LARGE_TENSOR_BYTES)
    assert plan.size_bytes <= inspect(tmp_path).bytes + 512


def test_many_tiny_tensors_stay_together(tmp_path: Path) -> None:
    """A thousand one-byte tensors are one copy, not a thousand."""
    write(tmp_path / "x.safetensors", serialise([tensor(str(number), "U8", [1]) for number in range(1000)]))

    plan = plan_placement(inspect(tmp_path))

    assert len(plan.runs[0]) == 1
    assert plan.size_bytes == 1000
