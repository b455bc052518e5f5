"""Stage ``preflight`` and its process: everything that can be known of a checkpoint before a device is touched.

Standard library only. One job in, one report out; a checkpoint that is refused is refused in
one line that names file, tensor and numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Union

from remote_agent.errors import CheckpointError
from remote_agent.loader.checkpoint import Checkpoint, CheckpointProblem, Examination, examine
from remote_agent.loader.files import describe, open_regular, read_exactly
from remote_agent.loader.filesystem import filesystem_of
from remote_agent.loader.problems import shown
from remote_agent.loader.residency import measure_residency
from remote_agent.protocol.framing import FrameReader, ProtocolError
from remote_agent.protocol.internal import PreflightReport, WorkerJob, dump, parse
from remote_agent.protocol.messages import Failure, Recipe, Tier

Fact = Union[int, float, str, bool, None]

STAGE = "preflight"
CACHED_SHARE = 0.95
"""From this share in the page cache on, a start counts as ``cached``."""

LINES_REPORTED = 50
LINE_LIMIT_CHARACTERS = 2000
CONFIG_LIMIT_BYTES = 16 << 20

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "tiktoken.model",
)


def main(argv: list[str]) -> int:
    """Read one WorkerJob from the inherited socket ``--fd``, answer one PreflightReport, end."""
    parser = argparse.ArgumentParser(prog="python -m remote_agent preflight-child")
    parser.add_argument("--fd", type=int, required=True, help="descriptor of the socket to agentd")
    with socket.socket(fileno=parser.parse_args(argv).fd) as sock:
        sock.setblocking(True)
        job = _receive(sock)
        if job is None:
            return 0
        try:
            sock.sendall(_dump(check_recipe(job.recipe, Path(job.cache_directory))))
        except OSError:
            return 0  # nobody waits for it any more
    return 0


def check_recipe(recipe: Recipe, cache_directory: Path | None = None) -> PreflightReport:
    """Return what is known of a recipe's checkpoint; never raises for a bad one."""
    examination = examine(_expanded(recipe.model.path), recipe.model.revision)
    problems = list(examination.problems)
    checkpoint = examination.checkpoint
    extra: dict[str, Fact] = {"ignored": len(examination.ignored)}
    if checkpoint is not None:
        if recipe.model.adapter == "native" and recipe.builds_model:
            problems += _check_native(checkpoint.root, recipe)
        extra["config"] = (checkpoint.root / "config.json").is_file()
        extra["filesystem"] = filesystem_of(checkpoint.root)
    extra.update(_describe_cache_directory(cache_directory))
    cached_bytes: int | None = None
    if checkpoint is not None and not problems:
        try:
            cached_bytes = _measure_cache(checkpoint, extra)
        except CheckpointError as error:
            problems += error.problems
    return _report(examination, problems, cached_bytes, extra)


def _expanded(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError:  # no home directory is known for that user
        return Path(path)


def _dump(report: PreflightReport) -> bytes:
    """Return the report as one frame; one that does not fit is refused instead of cut."""
    try:
        return dump(report)
    except ProtocolError as error:
        detail = f"{len(report.shards)} shards are more than one report can name: {error}"
        failure = Failure("too_many_shards", detail, STAGE)
        return dump(PreflightReport(False, (), report.bytes, report.tensors, None, failure, report.extra))


def _report(
    examination: Examination, problems: list[CheckpointProblem], cached_bytes: int | None, extra: Mapping[str, Fact]
) -> PreflightReport:
    identities = examination.checkpoint.identities if examination.checkpoint is not None else ()
    return PreflightReport(
        ok=not problems,
        shards=identities,
        bytes=examination.bytes,
        tensors=examination.tensors,
        cached_bytes=cached_bytes,
        failure=_failure(problems) if problems else None,
        extra=extra,
    )


def _failure(problems: list[CheckpointProblem]) -> Failure:
    """Return the first problem as the failure's line, and all of them as its log."""
    first = problems[0]
    detail = str(first)[:LINE_LIMIT_CHARACTERS]
    if len(problems) > 1:
        detail += f" (and {len(problems) - 1} more)"
    lines = [str(problem)[:LINE_LIMIT_CHARACTERS] for problem in problems[:LINES_REPORTED]]
    return Failure(first.code, detail, STAGE, tuple(lines) if len(lines) > 1 else ())


def _measure_cache(checkpoint: Checkpoint, extra: dict[str, Fact]) -> int | None:
    residency = measure_residency(checkpoint.shards)
    extra["residency"] = residency.how
    if residency.reason is not None:
        extra["residency_reason"] = residency.reason
    cached = residency.cached_bytes is not None and 0 < checkpoint.bytes * CACHED_SHARE <= residency.cached_bytes
    extra["tier_from"] = (Tier.CACHED if cached else Tier.COLD).value
    return residency.cached_bytes


def _check_native(root: Path, recipe: Recipe) -> list[CheckpointProblem]:
    problems = []
    config = _check_config(root / "config.json")
    if config is not None:
        problems.append(config)
    if recipe.request.prompt is not None and not any((root / name).is_file() for name in TOKENIZER_FILES):
        detail = (
            f"a prompt is given and {shown(str(root), 400)} holds no tokenizer ({', '.join(TOKENIZER_FILES[:4])}, …)"
        )
        problems.append(CheckpointProblem("no_tokenizer", None, None, detail))
    return problems


def _check_config(path: Path) -> CheckpointProblem | None:
    try:
        descriptor = open_regular(path)
    except CheckpointError as error:
        text = "; ".join(problem.detail for problem in error.problems)
        return CheckpointProblem("no_config", path.name, None, f"{text}; a native run needs it to build the model")
    try:
        content = read_exactly(descriptor, 0, CONFIG_LIMIT_BYTES)
        if not isinstance(json.loads(content), dict):
            return CheckpointProblem("no_config", path.name, None, "is not a JSON object")
    except OSError as error:
        return CheckpointProblem("no_config", path.name, None, f"can't be read: {describe(error)}")
    except (ValueError, RecursionError) as error:
        return CheckpointProblem("no_config", path.name, None, f"is not JSON: {shown(str(error))}")
    finally:
        os.close(descriptor)
    return None


def _describe_cache_directory(path: Path | None) -> dict[str, Fact]:
    """Say whether compile caches can be written where they are meant to be; the first folder that exists decides."""
    if path is None or not str(path).strip(".") or not path.is_absolute():
        return {}
    there = path
    while not there.exists() and there != there.parent:
        there = there.parent
    try:
        is_writable = stat.S_ISDIR(there.stat().st_mode) and os.access(there, os.W_OK | os.X_OK)
        space = os.statvfs(there)
    except OSError as error:
        return {"cache_writable": False, "cache_reason": describe(error)}
    return {"cache_writable": is_writable, "cache_free_bytes": space.f_bavail * space.f_frsize}


def _receive(sock: socket.socket) -> WorkerJob | None:
    """Return the job, or None if the other side closed first. Raises: ProtocolError for anything else."""
    reader = FrameReader()
    while data := sock.recv(1 << 16):
        for line in reader.feed(data):
            message = parse(line)
            if not isinstance(message, WorkerJob):
                raise ProtocolError(f"preflight waits for a job, not for a {type(message).__name__}")
            return message
    return None
