"""How much of a device may be held by warm models: ``80%`` of its memory, or ``60 GB``."""

from __future__ import annotations

import re
from dataclasses import dataclass

_WRITTEN = re.compile(r"(\d{1,18}(?:\.\d{1,6})?)\s*(%|[kMGT]i?B|B|)")
_UNIT_BYTES = {
    "": 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "kiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40,
}  # fmt: skip


@dataclass(frozen=True)
class Budget:
    """A limit as it was written: either a share of a device's memory or bytes."""

    text: str
    share: float | None = None
    size_bytes: int = 0

    def limit_bytes(self, total_bytes: int | None) -> int | None:
        """Return the limit on a device of ``total_bytes``; None where it is a share of what nobody knows."""
        if self.share is None:
            return self.size_bytes
        return None if total_bytes is None else int(total_bytes * self.share)


def parse_budget(text: str) -> Budget:
    """Return the budget that ``text`` means. Raises: ValueError that says what can be written."""
    written = _WRITTEN.fullmatch(text.strip())
    if written is None:
        raise ValueError(f"{text[:40]!r} is neither a percentage (80%) nor a size (60 GB, 64 GiB)")
    number, unit = float(written[1]), written[2]
    if unit != "%":
        return Budget(text.strip(), None, int(number * _UNIT_BYTES[unit]))
    if number > 100:
        raise ValueError(f"{text[:40]!r} is more than a whole device")
    return Budget(text.strip(), number / 100)
