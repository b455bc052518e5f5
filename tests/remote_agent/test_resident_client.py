"""``remote_agent.attach``: a resident model's tensors in another process, and every way in which there are none."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import remote_agent
from remote_agent import resident_client
from remote_agent.agentd.paths import ATTACH_FILE_NAME, StateDir
from remote_agent.errors import DeviceError, KeeperError, NotResidentError, ResidentLostError, StateDirError
from remote_agent.keeper.client import KeeperAddress, ask, list_residents
from remote_agent.loader.load import Loaded, load
from remote_agent.resident.manifest import write_manifest
from remote_agent.resident_client import Attached, attach
from tests.remote_agent import checkpoints
from tests.remote_agent.agentd.agents import DEADLINE_S, REPOSITORY, eventually
from tests.remote_agent.fake_cuda import UUID_TEXT, FakeGpu, FakeRuntime
from tests.remote_agent.keeper.keepers import at_rest, memory
from tests.remote_agent.resident.residents import keeping_for, load_shared, make_resident

SEVERAL_DTYPES = {
    "half": torch.randn(3, 5, dtype=torch.float16),
    "brain": torch.randn(64, 33, dtype=torch.bfloat16),
    "byte": torch.arange(7, dtype=torch.uint8),
    "flag": torch.tensor([True, False, True]),
    "long": torch.arange(9, dtype=torch.int64).reshape(3, 3),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "empty": torch.empty(0, 4),
    "eight": torch.arange(16, dtype=torch.float32).to(torch.float8_e4m3fn),
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a checkpoint of many dtypes, some at odd places."""
    folder = tmp_path / "models" / "tiny"
    folder.mkdir(parents=True)
    save_file(SEVERAL_DTYPES, folder / "model.safetensors")
    return folder


@pytest.fixture
def resident(keeper: int, state: StateDir, model: Path) -> str:
    """Return the name of a resident whose loader has let go of it."""
    return make_resident(state, model)


def attached_by(state: StateDir) -> list[int]:
    return [pid for one in list_residents(KeeperAddress(state)) for pid in one.attached]


def nobody_is_attached(state: StateDir) -> bool:
    gc.collect()
    return eventually(lambda: not attached_by(state), "every lease ends")


def equal(ours: Attached, theirs: dict[str, torch.Tensor]) -> bool:
    """Whether tensors agree in name, dtype, shape and bytes."""
    return ours.tensors.keys() == theirs.keys() and all(
        (one.dtype, one.shape) == (theirs[name].dtype, theirs[name].shape)
        and torch.equal(one.reshape(-1).view(torch.uint8), theirs[name].reshape(-1).view(torch.uint8))
        for name, one in ours.tensors.items()
    )


def test_a_resident_s_tensors_are_those_of_the_files(resident: str, state: StateDir) -> None:
    """Every dtype and shape, byte for byte; the package itself has the name, and the lease ends with the block."""
    with remote_agent.attach("tiny", state_dir=state.root) as attached:
        assert (attached.name, attached.device, attached.is_resident) == (resident, "cpu", True)
        assert equal(attached, SEVERAL_DTYPES)
        assert attached_by(state) == [os.getpid()]
        assert set(attached.steps) == {"fetch", "map", "views", "verify"}

    assert nobody_is_attached(state)
    with pytest.raises(ValueError, match="is closed"):
        _ = attached.tensors


def test_a_name_is_a_recipe_s_a_path_or_the_resident_s(
    resident: str,
    state: StateDir,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A path is the same however it is written."""
    (model.parent / "link").symlink_to(model)
    monkeypatch.chdir(model.parent)
    for name in ("tiny", resident, str(model), model, model.parent / "link", f"./{model.name}"):
        attach(name, state_dir=state.root).close()

    assert nobody_is_attached(state)


def test_a_path_whose_files_changed_is_not_what_is_resident(resident: str, state: StateDir, model: Path) -> None:
    """By name the old weights are still to be had, and so they are by a path whose files are gone."""
    shard = model / "model.safetensors"
    save_file({"other": torch.zeros(3)}, shard)

    with pytest.raises(
        NotResidentError, match=r"not resident as it is now: .*model\.safetensors changed since .*"
    ) as caught:
        attach(model, state_dir=state.root)
    assert caught.value.resident == (resident,)
    with attach(model, state_dir=state.root, load=True) as loaded:
        assert (list(loaded.tensors), loaded.is_resident) == (["other"], False)
    attach(resident, state_dir=state.root).close()
    shard.unlink()
    attach(model, state_dir=state.root).close()

    assert nobody_is_attached(state)


def test_the_lease_lasts_as_long_as_a_tensor(resident: str, state: StateDir) -> None:
    """What is used elsewhere stays mapped, and the keeper goes on counting it."""
    with attach("tiny", state_dir=state.root) as attached:
        kept = attached.tensors["brain"][3]

    assert attached_by(state) == [os.getpid()]
    assert torch.equal(kept, SEVERAL_DTYPES["brain"][3])
    del kept, attached
    assert nobody_is_attached(state)


def test_private_tensors_may_be_written_and_no_other_process_sees_it(
    resident: str,
    state: StateDir,
) -> None:
    """They are copies; one name is a name, not its letters; an unknown name is refused."""
    with attach("tiny", state_dir=state.root, private="long") as attached:
        attached.tensors["long"].zero_()
        with attach("tiny", state_dir=state.root) as other:
            assert torch.equal(other.tensors["long"], SEVERAL_DTYPES["long"])
    del attached, other

    with pytest.raises(ValueError, match="has no tensor 'nothing'"):
        attach("tiny", state_dir=state.root, private=["nothing"])
    assert nobody_is_attached(state)


def test_several_attach_at_once(resident: str, state: StateDir) -> None:
    """From many threads, each with its own lease."""
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(5):
                with attach("tiny", state_dir=state.root) as attached:
                    assert equal(attached, SEVERAL_DTYPES)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert errors == []
    assert nobody_is_attached(state)


def test_what_is_not_resident_is_said_with_what_is(resident: str, state: StateDir) -> None:
    """The error names the residents there are."""
    with pytest.raises(NotResidentError, match=f"other is not resident; resident is: {resident} .tiny, ") as caught:
        attach("other", state_dir=state.root)
    assert caught.value.resident == (resident,)
    with pytest.raises(NotResidentError, match="tiny is not resident on GPU-1; resident is:"):
        attach("tiny", state_dir=state.root, device="GPU-1")
    with pytest.raises(NotResidentError, match="is not resident; resident is:"):
        attach("/models/\0tiny", state_dir=state.root)


def test_without_a_keeper_nothing_is_resident(state: StateDir, tmp_path: Path, model: Path) -> None:
    """A host on which no agent ever ran, without a state directory, is no other case: a fallback is loaded."""
    never = tmp_path / "home" / "glowplug-agent"
    for root in (state.root, never):
        with pytest.raises(NotResidentError, match=f"nothing is resident: no keeper listens at {root}/run"):
            attach("tiny", state_dir=root)
    with attach("tiny", state_dir=never, fallback=model, device="cpu") as attached:
        assert equal(attached, SEVERAL_DTYPES)
    state.run.chmod(0o755)
    with pytest.raises(StateDirError, match="mode 0755 lets others in"):
        attach("tiny", state_dir=state.root, fallback=model)


def test_a_name_that_means_several_is_not_guessed(
    resident: str,
    state: StateDir,
    tmp_path: Path,
) -> None:
    """Both are listed; by its own name or path each is attached."""
    other = tmp_path / "models" / "second"
    other.mkdir()
    save_file({"a": torch.zeros(3)}, other / "model.safetensors")
    second = make_resident(state, other)

    with pytest.raises(NotResidentError, match="tiny is resident 2 times, name one or a device: ") as caught:
        attach("tiny", state_dir=state.root)
    assert set(caught.value.resident) == {resident, second}
    with attach(other, state_dir=state.root) as attached:
        assert attached.name == second


def test_a_model_that_is_not_resident_is_loaded_where_that_is_asked_for(
    keeper: int,
    state: StateDir,
    model: Path,
) -> None:
    """By its own path or by another; it says that it was loaded, and why."""
    for options in ({"load": True}, {"fallback": model}):
        name = model if "load" in options else "tiny"
        with attach(name, state_dir=state.root, device="cpu", **options) as attached:  # type: ignore[arg-type]
            assert equal(attached, SEVERAL_DTYPES)
            assert not attached.is_resident
            assert "is not resident" in (attached.reason or "")


def test_memory_whose_bytes_are_others_is_lost(keeper: int, state: StateDir, model: Path) -> None:
    """The sampled checksum tells; without it the bytes are taken as they are."""
    keeping, keepable = keeping_for(state, model), load_shared(model, resident_client.CpuDevice())
    object.__setattr__(keepable, "checksum", "00" * 16)
    keeping.keep(keepable)

    with pytest.raises(ResidentLostError, match="the checksum of its samples is not that of what was loaded"):
        attach("tiny", state_dir=state.root)
    assert nobody_is_attached(state)
    attach("tiny", state_dir=state.root, verify=False).close()
    with attach("tiny", state_dir=state.root, fallback=model, device="cpu") as attached:
        assert "checksum" in (attached.reason or "")


def test_what_is_lost_is_not_mapped_beside_what_is_loaded_instead(
    keeper: int, state: StateDir, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device need not have room for a model twice."""
    keeping, keepable = keeping_for(state, model), load_shared(model, resident_client.CpuDevice())
    object.__setattr__(keepable, "checksum", "00" * 16)
    keeping.keep(keepable)
    keepable.memory.close()
    del keepable
    gc.collect()
    maps: list[str] = []

    def load_and_look(*args: Any, **options: Any) -> Loaded:
        maps.append(Path("/proc/self/maps").read_text())
        return load(*args, **options)

    monkeypatch.setattr(resident_client, "load_checkpoint", load_and_look)
    with attach("tiny", state_dir=state.root, fallback=model, device="cpu") as attached:
        assert "checksum" in (attached.reason or "")

    assert ["glowplug-weights" in one for one in maps] == [False]


def test_a_manifest_that_lies_is_nobody_s_model(
    resident: str,
    state: StateDir,
    keeper: int,
) -> None:
    """Garbage beside a good resident changes nothing for it, leaves nothing open, and is named for what it is."""
    address = KeeperAddress(state)
    with memory(b"no manifest", b"no memory") as descriptors:
        ask(address, "put garbage@cpu", descriptors)
    before, ours = at_rest(keeper), len(os.listdir("/proc/self/fd"))  # noqa: PTH208

    with pytest.raises(NotResidentError, match="garbage@cpu can't be used: a manifest of 11 bytes is torn"):
        attach("garbage@cpu", state_dir=state.root)
    attach("tiny", state_dir=state.root).close()
    gc.collect()
    assert at_rest(keeper) == before
    assert len(os.listdir("/proc/self/fd")) == ours  # noqa: PTH208


def test_a_manifest_under_another_name_is_nobody_s_model(resident: str, state: StateDir, model: Path) -> None:
    """What it calls itself is not said to the keeper, nor offered to anybody."""
    keepable = load_shared(model, resident_client.CpuDevice())
    manifest = replace(keeping_for(state, model)._manifest(keepable), name="llamé\ndrop! other", recipe="liar")
    descriptors = [write_manifest(manifest, keepable.entries), keepable.memory.export()]
    ask(KeeperAddress(state), "put liar@cpu", descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    keepable.memory.close()

    with pytest.raises(NotResidentError) as caught:
        attach("liar", state_dir=state.root)
    assert caught.value.resident == (resident,)


def test_another_user_s_socket_is_enough(resident: str, state: StateDir, tmp_path: Path) -> None:
    """With ``socket`` no state directory is looked at; where nobody listens nothing is resident."""
    entrance = tmp_path / "entrance"
    entrance.mkdir(mode=0o755)
    file = state.root / ATTACH_FILE_NAME
    file.write_text(f"directory {entrance}\n")
    file.chmod(0o600)
    eventually((entrance / "attach.sock").is_socket, "the keeper listens there")

    with attach("tiny", socket=entrance / "attach.sock") as attached:
        assert equal(attached, SEVERAL_DTYPES)
    with pytest.raises(NotResidentError):
        attach("tiny", socket=entrance / "nothing.sock")


def test_a_refusal_of_the_keeper_is_not_taken_for_absence(
    resident: str,
    state: StateDir,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who is not let in hears that, and is not told that nothing is there."""

    def refuse(address: KeeperAddress) -> object:
        raise KeeperError("not your keeper")

    monkeypatch.setattr(resident_client, "list_residents", refuse)
    with pytest.raises(KeeperError, match="not your keeper"):
        attach("tiny", state_dir=state.root, load=True)


def test_a_gpu_s_resident_is_attached_the_same_way(
    keeper: int,
    state: StateDir,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Over the fake driver: imported, mapped to read, given back; its device is known by UUID."""
    gpu = FakeGpu(FakeRuntime(), name=UUID_TEXT)
    gpu.initialise()
    gpu.open_context()
    name = make_resident(state, model, at=gpu, device=UUID_TEXT)
    gc.collect()
    assert gpu.fake_driver.vmm_leaks() == []
    monkeypatch.setattr(resident_client, "gpu_mapper", lambda uuid: gpu.map_shared)

    with attach("tiny", state_dir=state.root, device=UUID_TEXT) as attached:
        assert (attached.name, attached.device) == (name, UUID_TEXT)
        assert equal(attached, SEVERAL_DTYPES)
    del attached
    assert nobody_is_attached(state)
    assert gpu.fake_driver.vmm_leaks() == []
    gpu.fake_driver.fail_at = "cuMemImportFromShareableHandle"
    with pytest.raises(ResidentLostError, match="can't be imported: cuMemImportFromShareableHandle failed"):
        attach("tiny", state_dir=state.root)
    assert nobody_is_attached(state)
    gpu.close()


def test_a_gpu_that_this_process_does_not_see_is_named(
    keeper: int,
    state: StateDir,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither lost nor absent: the memory is on a device that is hidden here."""
    gpu = FakeGpu(FakeRuntime())
    gpu.initialise()
    gpu.open_context()
    make_resident(state, model, at=gpu, device="GPU-11111111-2222-3333-4444-555555555555")
    monkeypatch.setattr(resident_client, "visible_uuids", lambda driver: [UUID_TEXT])

    with pytest.raises(DeviceError, match=f"is not visible to this process; it sees {UUID_TEXT}"):
        attach("tiny", state_dir=state.root)
    gpu.close()


ATTACHER = """
import sys
from pathlib import Path
import torch
import remote_agent
from safetensors.torch import load_file
with remote_agent.attach(sys.argv[2], state_dir=sys.argv[1]) as model:
    expected = {}
    for shard in Path(sys.argv[3]).glob("*.safetensors"):
        expected.update(load_file(shard))
    assert model.tensors.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.tensors.items())
    print("equal", flush=True)
    sys.stdin.read()
"""


def test_another_process_attaches_and_its_death_leaves_nothing(
    keeper: int,
    state: StateDir,
    tmp_path: Path,
) -> None:
    """Equal to safetensors there; killed in the middle, its lease is gone and the resident is not."""
    folder = checkpoints.write_llama(tmp_path / "llama")
    make_resident(state, folder, recipe="llama")
    before = at_rest(keeper)
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", ATTACHER, str(state.root), "llama", str(folder)],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"equal\n"
    assert attached_by(state) == [process.pid]
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=DEADLINE_S)

    assert nobody_is_attached(state)
    assert at_rest(keeper) == before
    attach("llama", state_dir=state.root).close()


def test_the_agent_s_package_does_not_import_torch_for_it() -> None:
    """The name is looked up when it is used, so that agentd stays light."""
    code = "import sys, remote_agent as a; assert 'torch' not in sys.modules; a.attach; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)

    assert done.stdout == "True\n"
    with pytest.raises(AttributeError, match="has no attribute 'detach'"):
        _ = remote_agent.detach
