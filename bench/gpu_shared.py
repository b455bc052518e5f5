"""Weights in virtual-memory allocations outlive their loader: forward, graph, compiled layer, refused write.

``python bench/gpu_shared.py FOLDER``: this process holds descriptors and never loads CUDA. A loader without
torch fills the memory and ends; a reader maps it read-only and answers; a third process tries to write.
Prints one JSON document. Exit code 1 where any of it does not hold.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

GRANULE_BYTES = 2 << 20
PROMPT_TOKENS = 128
DTYPE_BYTES = 2


def main() -> int:
    """Run the three processes, or one of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--part", choices=("loader", "reader", "writer"))
    parser.add_argument("--fd", type=int)
    arguments = parser.parse_args()
    if arguments.part is None:
        return hold(arguments.folder)
    link = socket.socket(fileno=arguments.fd)
    {"loader": fill, "reader": read, "writer": write}[arguments.part](arguments.folder, link)
    return 0


def hold(folder: Path) -> int:
    """Keep the descriptor between the processes and print what they found."""
    found: dict[str, Any] = {"bytes": layout(folder)[1], "gpu_used_mib": {"before": used_mib()}}
    loader, link = start(folder, "loader")
    message, descriptors, _, _ = socket.recv_fds(link, 1 << 16, 1)
    found["loader"] = json.loads(message)
    found["loader"]["exit_code"] = loader.wait()
    found["holder_has_cuda"] = "libcuda" in Path("/proc/self/maps").read_text()
    found["gpu_used_mib"]["loader gone"] = used_mib()
    for part in ("reader", "writer"):
        process, link = start(folder, part)
        socket.send_fds(link, [b"?"], descriptors)
        with link.makefile() as lines:
            text = lines.read()
        found[part] = json.loads(text) if text else {"error": "said nothing"}
        found[part]["exit_code"] = process.wait()
        found["gpu_used_mib"][f"{part} gone"] = used_mib()
    os.close(descriptors[0])
    time.sleep(0.5)
    found["gpu_used_mib"]["descriptor closed"] = used_mib()
    print(json.dumps(found, indent=1))
    reader, held = found["reader"], found["gpu_used_mib"]
    token = reader.get("token_transformers")
    good = (
        token is not None
        and all(reader[name] == token for name in ("token_eager", "token_graph", "token_compiled"))
        and found["writer"].get("refused") is not None
        and not found["holder_has_cuda"]
        and held["descriptor closed"] < held["loader gone"]
    )
    return 0 if good else 1


def start(folder: Path, part: str) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Return one part's process and our end of its socket."""
    ours, theirs = socket.socketpair()
    argv = [sys.executable, __file__, str(folder), "--part", part, "--fd", str(theirs.fileno())]
    process = subprocess.Popen(argv, pass_fds=[theirs.fileno()])
    theirs.close()
    return process, ours


def layout(folder: Path) -> tuple[list[tuple[Path, int, int, dict[str, Any]]], int]:
    """Return ``(file, data's start, place in the allocation, header)`` of each shard, and the allocation's size."""
    shards, size = [], 0
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        shards.append((path, 8 + length, size, header))
        size += -(-(path.stat().st_size - 8 - length) // GRANULE_BYTES) * GRANULE_BYTES
    return shards, size


def used_mib() -> int:
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0])


class Memory:
    """One allocation, created or imported, mapped in this process's primary context."""

    def __init__(self, size: int, descriptor: int | None = None) -> None:
        from cuda.bindings import driver

        self._driver = driver
        self.call("cuInit", 0)
        device = self.call("cuDeviceGet", 0)
        self.call("cuCtxSetCurrent", self.call("cuDevicePrimaryCtxRetain", device))
        self.registers_read_only = self.call(
            "cuDeviceGetAttribute",
            driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED,
            device,
        )
        kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        wanted = driver.CUmemAllocationProp()
        wanted.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        wanted.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        wanted.location.id = 0
        wanted.requestedHandleTypes = kind
        flags = driver.CUmemAllocationGranularity_flags
        self.granularity = [
            self.call("cuMemGetAllocationGranularity", wanted, flag)
            for flag in (flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM, flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED)
        ]
        laps = [time.perf_counter_ns()]
        if descriptor is None:
            handle = self.call("cuMemCreate", size, wanted, 0)
        else:
            handle = self.call("cuMemImportFromShareableHandle", descriptor, kind)
        laps.append(time.perf_counter_ns())
        self.address = int(self.call("cuMemAddressReserve", size, 0, 0, 0))
        self.call("cuMemMap", self.address, size, 0, handle, 0)
        access = driver.CUmemAccessDesc()
        access.location = wanted.location
        rights = driver.CUmemAccess_flags
        writable = descriptor is None
        access.flags = rights.CU_MEM_ACCESS_FLAGS_PROT_READWRITE if writable else rights.CU_MEM_ACCESS_FLAGS_PROT_READ
        self.call("cuMemSetAccess", self.address, size, [access], 1)
        laps.append(time.perf_counter_ns())
        self.laps_us = [(later - earlier) // 1000 for earlier, later in itertools.pairwise(laps)]
        self._handle, self._kind = handle, kind

    def call(self, name: str, *arguments: Any) -> Any:
        code, *results = getattr(self._driver, name)(*arguments)
        if int(code):
            raise RuntimeError(f"{name}: {code}")
        return results[0] if results else None

    def export(self) -> int:
        return int(self.call("cuMemExportToShareableHandle", self._handle, self._kind, 0))


def fill(folder: Path, link: socket.socket) -> None:
    """Copy every data section to its place, hand the descriptor over and end at once."""
    shards, size = layout(folder)
    memory = Memory(size)
    for path, data_start, place, _ in shards:
        content = path.read_bytes()[data_start:]
        memory.call("cuMemcpyHtoD", memory.address + place, content, len(content))
    told = {
        "create_us": memory.laps_us[0],
        "map_us": memory.laps_us[1],
        "granularity": memory.granularity,
        "registers_read_only": memory.registers_read_only,
        "has_torch": "torch" in sys.modules,
    }
    socket.send_fds(link, [json.dumps(told).encode()], [memory.export()])
    os._exit(0)


def take_base(link: socket.socket, size: int) -> tuple[Any, dict[str, Any]]:
    """Return the memory as one torch tensor of bytes by the public DLPack route, and what that took."""
    import torch

    torch.cuda.init()
    torch.ones(1, device="cuda")
    _, descriptors, _, _ = socket.recv_fds(link, 1, 1)
    memory = Memory(size, descriptors[0])
    begun = time.perf_counter_ns()
    import cuda.core as core

    buffer_type = getattr(core, "Buffer", None)
    if buffer_type is None:
        from cuda.core.experimental import Buffer as buffer_type
    imported = time.perf_counter_ns()
    base = torch.from_dlpack(buffer_type.from_handle(memory.address, size, owner=memory)).view(torch.uint8)
    told = {
        "import_us": memory.laps_us[0],
        "map_us": memory.laps_us[1],
        "core_import_us": (imported - begun) // 1000,
        "dlpack_us": (time.perf_counter_ns() - imported) // 1000,
        "cuda_core": core.__version__,
        "device": str(base.device),
    }
    return base, told


def read(folder: Path, link: socket.socket) -> None:
    """Answer from the mapped weights: eager, as a CUDA graph, with the layer compiled."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shards, size = layout(folder)
    base, told = take_base(link, size)
    tensors = {
        name: base[place + entry["data_offsets"][0] : place + entry["data_offsets"][1]]
        .view(torch.bfloat16)
        .view(entry["shape"])
        for _, _, place, header in shards
        for name, entry in header.items()
    }
    configuration = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(configuration, dtype=torch.bfloat16)
    model.load_state_dict(tensors, strict=False, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(configuration, device="cuda")
    model.eval()
    tokens = torch.arange(PROMPT_TOKENS, device="cuda")[None]

    def answer(net: Any) -> Any:
        return net(tokens, use_cache=False, logits_to_keep=1).logits[0, -1]

    def timed(function: Any) -> tuple[Any, float]:
        torch.cuda.synchronize()
        begun = time.perf_counter_ns()
        result = function()
        torch.cuda.synchronize()
        return result, round((time.perf_counter_ns() - begun) / 1e6, 2)

    with torch.inference_mode():
        eager, told["first_forward_ms"] = timed(lambda: answer(model))
        _, told["eager_ms"] = timed(lambda: answer(model))
        told["token_eager"] = int(eager.argmax())
        graph = torch.cuda.CUDAGraph()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            answer(model)
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            output = answer(model)
        graph.replay()
        _, told["graph_ms"] = timed(graph.replay)
        told["token_graph"] = int(output.argmax())
        for layer in model.model.layers:
            layer.compile(dynamic=True)
        _, told["compile_ms"] = timed(lambda: answer(model))
        compiled, told["compiled_ms"] = timed(lambda: answer(model))
        told["token_compiled"] = int(compiled.argmax())
        told["compiled_difference"] = float((compiled.float() - eager.float()).abs().max())
        told["counters"] = {
            name: dict(values) for name, values in torch._dynamo.utils.counters.items() if name in ("stats", "inductor")
        }
        plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).cuda().eval()
        told["token_transformers"] = int(answer(plain).argmax())
    link.sendall(json.dumps(told).encode())
    os._exit(0)


def write(folder: Path, link: socket.socket) -> None:
    """Try to write through the read-only mapping with a kernel; say what came of it."""
    import torch

    base, told = take_base(link, layout(folder)[1])
    told["refused"] = None
    try:
        base[:1024].fill_(7)
        torch.cuda.synchronize()
    except RuntimeError as error:
        told["refused"] = " ".join(str(error).split())[:200]
    link.sendall(json.dumps(told).encode())
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
