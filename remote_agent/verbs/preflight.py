"""``preflight PATH``: check a checkpoint without touching a GPU."""

from __future__ import annotations

import argparse
import json

from remote_agent.loader.checkpoint import Examination, examine
from remote_agent.loader.problems import counted, shown
from remote_agent.verbs._common import path_argument


def main(argv: list[str]) -> int:
    """Print what is at PATH; return 0 if it can be loaded, 1 if it is refused, 2 for a usage error."""
    parser = argparse.ArgumentParser(
        prog="python -m remote_agent preflight",
        description="Check a safetensors checkpoint: headers against files and index; no weight is read.",
    )
    parser.add_argument(
        "path", type=path_argument, help="a directory, a .safetensors file, an index, or a Hugging Face cache directory"
    )
    parser.add_argument("--revision", help="which snapshot of a Hugging Face cache directory (default: main)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    try:
        arguments = parser.parse_args(argv)
    except SystemExit as exit_request:
        return int(exit_request.code or 0)
    examination = examine(arguments.path, arguments.revision)
    if arguments.json:
        print(json.dumps(examination.as_dict()))
    else:
        print_examination(examination)
    return 0 if examination.verdict == "ok" else 1


def print_examination(examination: Examination) -> None:
    """Print one line a problem, one a file left out, and the sum."""
    for problem in examination.problems:
        print(f"refused: {problem}")
    for item in examination.ignored:
        print(f"ignored: {shown(item.file)}: {item.reason}")
    sizes = f"{examination.bytes:,} bytes in {counted(examination.tensors, 'tensor')}"
    print(f"{examination.verdict}: {counted(len(examination.shards), 'shard')}, {sizes}")
