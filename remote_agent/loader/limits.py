"""How a load uses its host: threads, buffers and registrations. The defaults are what measured best on an H200."""

from __future__ import annotations

from dataclasses import dataclass, replace

from remote_agent.loader.filemap import PAGE_BYTES


@dataclass(frozen=True)
class Cut:
    """One division of the pinned ring: ``threads`` lanes of ``depth`` buffers of ``buffer_bytes`` each."""

    threads: int
    depth: int
    buffer_bytes: int

    def __post_init__(self) -> None:
        if min(self.threads, self.depth, self.buffer_bytes) < 1:
            raise ValueError(f"{self}: threads, depth and buffer_bytes must be above 0")

    @property
    def size_bytes(self) -> int:
        return self.threads * self.depth * self.stride_bytes

    @property
    def stride_bytes(self) -> int:
        """Return the distance from buffer to buffer: O_DIRECT wants each to begin on a page."""
        return -(-self.buffer_bytes // PAGE_BYTES) * PAGE_BYTES


@dataclass(frozen=True)
class LoaderLimits:
    """``mixed`` readers work beside the one thread that registers, ``staged`` ones alone, ``cold`` ones on a disk.

    The pinned ring is as large as the largest cut. ``registration_bytes``: the most that is
    registered in one call, which holds locks that other processes wait for. ``registered_bytes``:
    the most that stays registered at once; None leaves all of it until the last byte has arrived,
    since giving back competes with registering.
    """

    mixed: Cut = Cut(5, 2, 8 << 20)
    staged: Cut = Cut(12, 2, 4 << 20)
    cold: Cut = Cut(16, 2, 3 << 20)
    registration_bytes: int = 64 << 20
    registered_bytes: int | None = None

    def within(self, processors: int) -> LoaderLimits:
        """Return these limits with no more threads that copy than there are processors; readers of a disk only wait."""
        mixed = replace(self.mixed, threads=max(1, min(self.mixed.threads, processors - 1)))
        staged = replace(self.staged, threads=max(2, min(self.staged.threads, processors)))
        return replace(self, mixed=mixed, staged=staged)

    @property
    def ring_bytes(self) -> int:
        return max(cut.size_bytes for cut in (self.mixed, self.staged, self.cold))
