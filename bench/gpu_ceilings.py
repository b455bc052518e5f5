"""What the host gives at most, apart from any loader: pinned copies, registration, the disk. Prints one JSON document.

``python -m bench.gpu_ceilings FOLDER``: FOLDER holds safetensors files. Pinned: copies to the GPU from one buffer of
1 GiB. Registration: ``cudaHostRegister`` of cached pages by 64 MiB, read-only, and giving them back. Disk: all bytes by
128 threads, the page cache dropped before each read. Reads stop when the time is over.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.raw_disk import THREADS, drop_page_cache, refill_page_cache, time_raw_read

PIECE_BYTES = 64 << 20
REGISTERED_BYTES = 4 << 30
ROUNDS = 5


def main() -> int:
    """Measure and print; return 1 if the GPU could not be measured, which costs its own figures alone."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cuda:0", help="cuda:0, or cpu for the disk alone (default: cuda:0)")
    parser.add_argument("--budget-s", type=float, default=120, help="begin no further read after that (default: 120)")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.budget_s
    shards = sorted(arguments.folder.glob("*.safetensors"))
    found: dict[str, object] = {"bytes": sum(shard.stat().st_size for shard in shards)}
    if arguments.device != "cpu":
        try:
            from bench.loaders import measure_ceiling

            found["pinned"] = measure_ceiling()
            refill_page_cache(shards)
            found["registration"] = measure_registration(shards[0])
        except Exception as error:
            found["problems"] = [f"{type(error).__name__}: {error}"]
    found["disk"] = measure_disk(shards, deadline)
    print(json.dumps(found, indent=1))
    return int("problems" in found)


def measure_registration(shard: Path) -> dict[str, object]:
    """Return the bytes a second at which cached pages of a file are registered, and at which they are given back."""
    from remote_agent.devices.calls import Calls
    from remote_agent.devices.cuda import RUNTIME
    from remote_agent.loader.filemap import FileMap
    from remote_agent.loader.registrations import READ_ONLY

    runtime = Calls(RUNTIME)
    registering, giving_back = [], []
    with shard.open("rb") as file:
        size = min(REGISTERED_BYTES, shard.stat().st_size) // PIECE_BYTES * PIECE_BYTES
        for _ in range(ROUNDS if size else 0):
            with FileMap(file.fileno(), size) as mapped:
                pieces = range(mapped.address, mapped.address + size, PIECE_BYTES)
                begun = time.perf_counter()
                for address in pieces:
                    runtime("cudaHostRegister", address, PIECE_BYTES, READ_ONLY)
                registered = time.perf_counter()
                for address in pieces:
                    runtime("cudaHostUnregister", address)
                registering.append(size / (registered - begun))
                giving_back.append(size / (time.perf_counter() - registered))
    return {
        "piece_bytes": PIECE_BYTES,
        "bytes": size,
        "register_bytes_s": registering,
        "unregister_bytes_s": giving_back,
    }


def measure_disk(shards: Sequence[Path], deadline: float) -> dict[str, object]:
    """Return the seconds of raw reads both ways in turn: one pair at least, then as many as there is time for."""
    times: dict[str, list[float]] = {"direct_s": [], "buffered_s": []}
    refusals: dict[str, str] = {}
    longest, how = 0.0, ""
    for number in range(ROUNDS):
        if number and time.monotonic() + longest > deadline:
            break
        begun = time.monotonic()
        for name, is_direct in (("direct_s", True), ("buffered_s", False)):
            how = drop_page_cache(shards)
            try:
                times[name].append(time_raw_read(shards, is_direct))
            except OSError as error:
                refusals[name] = str(error)
        longest = max(longest, time.monotonic() - begun)
    return {"threads": THREADS, "dropped": how, "refusals": refusals, **times}


if __name__ == "__main__":
    sys.exit(main())
