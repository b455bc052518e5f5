"""Errors of the history.

HistoryError
├── NoHistoryError              nothing has been recorded at that path yet
├── UnavailableError            the file or its folder can't be used: permissions, full disk, another owner
├── UnsupportedFilesystemError  the file would lie on a network filesystem
├── ForeignFileError            a database of some other program
├── NewerSchemaError            written by a newer Glowplug
├── DamagedError                the file is damaged, or was replaced while in use
├── AmbiguousRunError           a run's prefix fits several runs; carries them
├── AmbiguousRolloutError       a rollout's prefix fits several rollouts
├── RolloutError                a rollout can't be begun or changed as it stands
│   ├── LeaseHeldError          another process carries it out; says which, and for how long at least
│   └── LeaseLostError          another process has taken it over
├── WatchHeldError              another process watches a node for that recipe; says which
└── WriterFullError             the writer takes no more until it has caught up
"""

from __future__ import annotations


class HistoryError(Exception):
    """Anything the history raises on purpose; the text is one line for a person."""


class NoHistoryError(HistoryError):
    """There is no history at that path."""


class UnavailableError(HistoryError):
    """The file or its folder can't be read or written."""


class UnsupportedFilesystemError(HistoryError):
    """SQLite's write-ahead log needs a local filesystem."""


class ForeignFileError(HistoryError):
    """The file is a sound database, but not a history."""


class NewerSchemaError(HistoryError):
    """The history's schema is newer than this program knows."""


class DamagedError(HistoryError):
    """The file can't be trusted."""


class AmbiguousRunError(HistoryError):
    """A prefix fits more than one run; ``candidates`` are their uids."""

    def __init__(self, prefix: str, candidates: tuple[str, ...]) -> None:
        super().__init__(f"{prefix} fits {len(candidates)} runs: {', '.join(candidates)}")
        self.candidates = candidates


class AmbiguousRolloutError(HistoryError):
    """A prefix fits more than one rollout."""

    def __init__(self, prefix: str, candidates: tuple[str, ...]) -> None:
        super().__init__(f"{prefix} fits {len(candidates)} rollouts: {', '.join(candidates)}")


class RolloutError(HistoryError):
    """A rollout can't be begun or changed as it stands."""


class LeaseHeldError(RolloutError):
    """Another process carries the rollout out."""

    def __init__(self, name: str, holder: str, left_s: float) -> None:
        super().__init__(
            f"rollout {name} is carried out by {holder}; its lease has {left_s:.1f} s left unless it is renewed"
        )
        self.holder = holder
        self.left_s = left_s


class LeaseLostError(RolloutError):
    """The rollout was taken over; nothing more may be done by who had it before."""


class WatchHeldError(HistoryError):
    """Another process watches a node for that recipe."""

    def __init__(self, node: str, recipe: str, holder: str, left_s: float) -> None:
        super().__init__(
            f"{node} is watched for {recipe} by {holder}; its lease has {left_s:.1f} s left unless it is renewed"
        )
        self.node = node
        self.holder = holder


class WriterFullError(HistoryError):
    """Too much waits to be written; nothing was taken."""
