"""``load PATH``: load a checkpoint onto a device, time it, and compare it with the safetensors library."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from remote_agent.devices import open_device
from remote_agent.errors import AgentError
from remote_agent.loader.checkpoint import examine
from remote_agent.loader.problems import counted
from remote_agent.protocol.messages import WeightsPolicy
from remote_agent.verbs._common import path_argument
from remote_agent.verbs.preflight import print_examination

if TYPE_CHECKING:
    from remote_agent.loader.load import Loaded
    from remote_agent.loader.verify import Verification


def main(argv: list[str]) -> int:
    """Load PATH and print how it went; return 0 when done, 1 on a refusal, failure or mismatch, 2 for a usage error."""
    parser = argparse.ArgumentParser(
        prog="python -m remote_agent load", description="Load a safetensors checkpoint onto a device and time it."
    )
    parser.add_argument(
        "path", type=path_argument, help="a directory, a .safetensors file, an index, or a Hugging Face cache directory"
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda:N or a GPU UUID (default: cpu)")
    parser.add_argument("--path", dest="policy", default="auto", choices=("auto", "mapped", "staged", "direct"))
    parser.add_argument("--revision", help="which snapshot of a Hugging Face cache directory (default: main)")
    parser.add_argument("--verify", action="store_true", help="compare every tensor with the safetensors library")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    try:
        arguments = parser.parse_args(argv)
    except SystemExit as exit_request:
        return int(exit_request.code or 0)
    try:
        return _load(arguments)
    except (AgentError, ImportError) as error:
        if arguments.json:
            print(json.dumps({"device": arguments.device, "error": str(error)}))
        print(f"load: {error}", file=sys.stderr)
        return 2 if getattr(error, "code", "") == "unknown_device" else 1


def _load(arguments: argparse.Namespace) -> int:
    examination = examine(arguments.path, arguments.revision)
    if examination.checkpoint is None:
        if arguments.json:
            print(json.dumps(examination.as_dict()))
        else:
            print_examination(examination)
        return 1
    device = open_device(arguments.device)
    device.initialise()
    # torch is imported only now: a refusal must not wait for it, and a GPU must be chosen before it
    from remote_agent.loader.load import load
    from remote_agent.loader.verify import verify

    device.open_context()
    try:
        policy = WeightsPolicy(path=arguments.policy)
        loaded = load(examination.checkpoint, device, policy, progress=lambda done, total: None)
        verification = verify(examination.checkpoint, loaded.tensors) if arguments.verify else None
    finally:
        device.close()
    if arguments.json:
        print(json.dumps(_as_dict(arguments.device, loaded, verification)))
    else:
        _print(arguments.device, loaded, verification)
    return 0 if verification is None or verification.is_equal else 1


def _as_dict(device: str, loaded: Loaded, verification: Verification | None) -> dict[str, object]:
    return {
        "device": device,
        "path": loaded.path,
        "reason": loaded.reason,
        "bytes": loaded.bytes,
        "tensors": len(loaded.tensors),
        "duration_ns": loaded.duration_ns,
        "rate_bytes_s": loaded.rate_bytes_s,
        "ceiling_bytes_s": loaded.ceiling_bytes_s,
        "steps_ns": loaded.steps,
        "counters": loaded.counters,
        "notes": [*loaded.notes, *(verification.notes if verification else ())],
        "verified": None if verification is None else verification.verified,
        "mismatches": None if verification is None else list(verification.mismatches),
    }


def _print(device: str, loaded: Loaded, verification: Verification | None) -> None:
    tensors = counted(len(loaded.tensors), "tensor")
    print(f"{loaded.bytes:,} bytes in {tensors} onto {device} by {loaded.path} in {loaded.duration_ns / 1e6:.1f} ms")
    if loaded.rate_bytes_s is not None:
        ceiling = f", ceiling {loaded.ceiling_bytes_s / 1e9:.2f} GB/s" if loaded.ceiling_bytes_s is not None else ""
        print(f"{loaded.rate_bytes_s / 1e9:.2f} GB/s{ceiling}")
    for line in (loaded.reason, *loaded.notes):
        if line:
            print(f"note: {line}")
    if verification is not None:
        for line in verification.notes:
            print(f"note: {line}")
        for line in verification.mismatches:
            print(f"differs: {line}")
        print(f"verified: {verification.verified} of {tensors}, {len(verification.mismatches)} differ")
