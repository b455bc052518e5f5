"""Who holds a lease."""

from __future__ import annotations

import os
import secrets
import socket

from console.clean import clean


def holder_name() -> str:
    """Return a name that this process has and no other, to hold leases by."""
    host = clean(socket.gethostname(), 80) or "unknown"
    return f"{host}:{os.getpid()}:{secrets.token_hex(4)}"
