"""How a load uses its host: threads, buffers and registrations."""

from __future__ import annotations

from dataclasses import dataclass, replace

from remote_agent.loader.filemap import PAGE_BYTES


@dataclass(frozen=True)
class Cut:
    """One division of the pinned ring: ``readers`` threads share ``buffers`` of ``buffer_bytes`` each."""

    readers: int
    buffers: int
    buffer_bytes: int

    def __post_init__(self) -> None:
        if min(self.readers, self.buffers, self.buffer_bytes) < 1:
            raise ValueError(f"{self}: readers, buffers and buffer_bytes must be above 0")

    @property
    def size_bytes(self) -> int:
        return self.buffers * self.stride_bytes

    @property
    def stride_bytes(self) -> int:
        """Return the distance from buffer to buffer: O_DIRECT wants each to begin on a page."""
        return -(-self.buffer_bytes // PAGE_BYTES) * PAGE_BYTES


@dataclass(frozen=True)
class LoaderLimits:
    """``mixed`` readers work beside registrations, ``staged`` ones alone, ``cold`` ones on a disk: those wait for it
    before they take a buffer, so there may be more of them than buffers.

    The pinned ring is as large as the largest cut. ``registration_bytes``: the most that is
    registered in one call, which holds locks that other processes wait for, and during which no full
    buffer is sent. ``registered_bytes``: the most that stays registered at once; None leaves all of it
    until the last byte has arrived, since giving back competes with registering. ``streams``: how many
    take full buffers in turn. ``switch_interval_s``: after that long a thread that runs Python lets another
    one of a load have the interpreter; None leaves it as it is.
    """

    mixed: Cut = Cut(5, 24, 4 << 20)
    staged: Cut = Cut(12, 24, 4 << 20)
    cold: Cut = Cut(128, 12, 8 << 20)
    registration_bytes: int = 32 << 20
    registered_bytes: int | None = None
    streams: int = 2
    switch_interval_s: float | None = 0.0002

    def within(self, processors: int) -> LoaderLimits:
        """Return these limits with no more threads that copy than there are processors; readers of a disk only wait."""
        mixed = replace(self.mixed, readers=max(1, min(self.mixed.readers, processors - 1)))
        staged = replace(self.staged, readers=max(2, min(self.staged.readers, processors)))
        return replace(self, mixed=mixed, staged=staged)

    @property
    def cuts(self) -> tuple[Cut, ...]:
        return self.mixed, self.staged, self.cold

    @property
    def ring_bytes(self) -> int:
        return max(cut.size_bytes for cut in self.cuts)
