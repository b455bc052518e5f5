"""The whole route on a real GPU: a loader that is dead, a keeper without CUDA, and who attaches."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from remote_agent.agentd.paths import StateDir
from remote_agent.devices.calls import Calls
from remote_agent.devices.cuda import DRIVER, visible_uuids
from remote_agent.errors import KeeperRefusedError
from remote_agent.keeper.client import KeeperAddress, ask
from remote_agent.resident_client import attach
from tests.remote_agent import checkpoints
from tests.remote_agent.agentd.agents import REPOSITORY, eventually

pytestmark = pytest.mark.gpu

LOADER = """
import sys
from pathlib import Path
from remote_agent.agentd.paths import StateDir
from remote_agent.devices import open_device
from tests.remote_agent.resident.residents import make_resident
device = open_device(sys.argv[3])
device.initialise()
device.open_context()
print(make_resident(StateDir(Path(sys.argv[1])), Path(sys.argv[2]), at=device, device=sys.argv[3]))
"""


def free_bytes() -> int:
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(0)[0]


@pytest.fixture
def uuid() -> str:
    torch.cuda.init()
    return visible_uuids(Calls(DRIVER))[0]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a checkpoint of some 100 MB, so that its memory can be told from the context's."""
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 16}
    return checkpoints.write_llama(tmp_path / "llama", torch.bfloat16, vocab_size=8192, num_hidden_layers=3, **sizes)


@pytest.fixture
def resident(keeper: int, state: StateDir, model: Path, uuid: str) -> str:
    """Return the name of a resident on the first GPU whose loader is dead."""
    command = [sys.executable, "-c", LOADER, str(state.root), str(model), uuid]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_memory_of_a_dead_loader_is_attached_without_a_copy(
    resident: str, state: StateDir, model: Path, uuid: str, keeper: int
) -> None:
    """Byte for byte safetensors', on the GPU, though the keeper has no CUDA in it; released, the memory is free."""
    assert "libcuda" not in Path(f"/proc/{keeper}/maps").read_text()
    expected = checkpoints.read_tensors(model)
    size = sum(tensor.nbytes for tensor in expected.values())
    attach(resident, state_dir=state.root).close()  # whatever a first use takes is taken now
    gc.collect()
    held = free_bytes()
    with attach("tiny", state_dir=state.root, device="cuda:0") as attached:
        assert (attached.name, attached.device) == (resident, uuid)
        assert held - free_bytes() < size // 2
        assert attached.tensors.keys() == expected.keys()
        assert all(tensor.is_cuda for tensor in attached.tensors.values())
        assert all(torch.equal(tensor.cpu(), expected[name]) for name, tensor in attached.tensors.items())
        with pytest.raises(KeeperRefusedError, match="is attached by 1"):
            ask(KeeperAddress(state), f"drop {resident}")
    del attached
    gc.collect()
    eventually(lambda: ask(KeeperAddress(state), "list").lines[0].split()[2:] == [], "the lease ends")
    ask(KeeperAddress(state), f"drop {resident}")

    eventually(lambda: free_bytes() - held > size // 2, "the memory is free")


WRITER = """
import sys
import torch
import remote_agent
with remote_agent.attach(sys.argv[2], state_dir=sys.argv[1]) as resident:
    tensor = next(iter(resident.tensors.values()))
    print(float(tensor.float().sum()) == float(tensor.float().sum()), flush=True)
    tensor.zero_()
    torch.cuda.synchronize()
    print("written", flush=True)
"""


def test_a_kernel_that_writes_fails_and_changes_nothing(resident: str, state: StateDir, model: Path) -> None:
    """In a process of its own, whose context may be lost with it; others read what was loaded."""
    command = [sys.executable, "-c", WRITER, str(state.root), resident]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    expected = checkpoints.read_tensors(model)

    assert done.stdout == "True\n", done.stderr
    assert done.returncode != 0
    with attach(resident, state_dir=state.root, private=["lm_head.weight"]) as attached:
        attached.tensors["lm_head.weight"].zero_()
        torch.cuda.synchronize()
        others = [name for name in expected if name != "lm_head.weight"]
        assert all(torch.equal(attached.tensors[name].cpu(), expected[name]) for name in others)


def test_a_module_answers_over_attached_memory(resident: str, state: StateDir, model: Path) -> None:
    """Its parameters are the resident's own memory; its tokens are those of transformers' own load."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from remote_agent.pipeline.build import build_on_meta

    config = AutoConfig.from_pretrained(model)
    ids = torch.arange(8, device="cuda:0")[None]
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).to("cuda:0").eval()
    with attach(resident, state_dir=state.root) as attached, torch.inference_mode():
        ours = build_on_meta(lambda: AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)).eval()
        ours.load_state_dict(dict(attached.tensors), assign=True)
        for module in ours.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to("cuda:0")

        assert ours(ids).logits.argmax(-1).tolist() == theirs(ids).logits.argmax(-1).tolist()
