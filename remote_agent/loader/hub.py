"""Finds the snapshot inside a Hugging Face cache directory (``models--org--name``)."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

from remote_agent.loader.files import describe, is_directory, refused
from remote_agent.loader.problems import CheckpointProblem, listed, shown

REF_LIMIT_CHARACTERS = 200


def resolve_snapshot(path: Path, revision: str | None = None) -> Path:
    """Return the folder to load: ``path`` itself, or the snapshot of ``revision`` (default ``main``) in a cache.

    Raises: CheckpointError (``revision_not_found``) naming what there is instead.
    """
    snapshots = path / "snapshots"
    if not (path.absolute().name.startswith("models--") and is_directory(snapshots)):
        if revision is None or (path.absolute().parent.name == "snapshots" and path.name == revision):
            return path
        detail = f"revision {shown(revision)!r} is asked for, and {shown(str(path), 400)} is no Hugging Face cache"
        raise refused(CheckpointProblem("revision_not_found", None, None, detail))
    available = _snapshot_names(snapshots)
    commit = _commit_of(path, "main" if revision is None else revision)
    if commit in available:
        return snapshots / commit
    if revision is None and commit is None and len(available) == 1:
        return snapshots / available[0]
    wanted = "main" if revision is None else revision
    named = f"revision {shown(wanted)!r}" + (f" (commit {shown(commit)})" if commit not in (None, wanted) else "")
    detail = f"{named} has no snapshot in {shown(str(path), 400)}; there is: {listed(available, 5) or 'none'}"
    raise refused(CheckpointProblem("revision_not_found", None, None, detail))


def _snapshot_names(snapshots: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in snapshots.iterdir() if entry.is_dir())
    except OSError as error:
        detail = f"can't be read: {describe(error)}"
        raise refused(CheckpointProblem("unreadable", snapshots.name, None, detail)) from error


def _commit_of(repository: Path, revision: str) -> str | None:
    parts = PurePosixPath(revision).parts
    if not parts or ".." in parts or "\0" in revision or revision.startswith("/"):
        return None
    try:
        with (repository / "refs" / revision).open(encoding="ascii") as file:
            return file.read(REF_LIMIT_CHARACTERS).strip()
    except (OSError, ValueError):
        return revision if re.fullmatch(r"[0-9a-f]{7,64}", revision) else None
