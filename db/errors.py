"""Errors of the history.

HistoryError
├── NoHistoryError              nothing has been recorded at that path yet
├── UnavailableError            the file or its folder can't be used: permissions, full disk, another owner
├── UnsupportedFilesystemError  the file would lie on a network filesystem
├── ForeignFileError            a database of some other program
├── NewerSchemaError            written by a newer Glowplug
├── DamagedError                the file is damaged, or was replaced while in use
├── AmbiguousRunError           a run's prefix fits several runs; carries them
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


class WriterFullError(HistoryError):
    """Too much waits to be written; nothing was taken."""
