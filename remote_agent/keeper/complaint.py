"""What the keeper says in its log."""

from __future__ import annotations

import os

LOG_DESCRIPTOR = 2


def complain(text: object) -> None:
    """Write a line to the log. A log that takes nothing, as on a full disk, costs no resident: the line is lost."""
    try:
        os.write(LOG_DESCRIPTOR, f"keeper: {text}\n".encode("utf-8", "backslashreplace"))
    except OSError:
        pass
