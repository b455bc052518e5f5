"""Which run is meant: by how it begins, all, or the only one."""

from __future__ import annotations

from collections.abc import Mapping

from console.errors import UsageError
from console.format import short_uid


def choose_runs(runs: Mapping[str, str], prefix: str | None, everything: bool, nothing: str) -> list[str]:
    """Return the uids that are meant among ``runs``, uid to description.

    Raises: UsageError with ``nothing`` where there is none, or with the candidates where it is not clear.
    """
    if prefix is not None and everything:
        raise UsageError("give --run or --all, not both")
    if not runs:
        raise UsageError(nothing)
    if everything:
        return list(runs)
    fitting = [uid for uid in runs if uid.startswith(prefix or "")]
    if len(fitting) == 1:
        return fitting
    candidates = ", ".join(f"{short_uid(uid)} ({runs[uid]})" for uid in (fitting or runs))
    if prefix is not None:
        what = f"{len(fitting)} runs begin with {prefix!r}" if fitting else f"no run begins with {prefix!r}"
    else:
        what = "say which with --run, or --all"
    raise UsageError(f"{what}: {candidates}")
