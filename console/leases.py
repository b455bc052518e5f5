"""Who holds a lease, and whether that process is there."""

from __future__ import annotations

import os
import secrets
import socket

from console.clean import clean


def holder_name() -> str:
    """Return a name that this process has and no other, to hold leases by."""
    return f"{_host()}:{os.getpid()}:{secrets.token_hex(4)}"


def may_live(holder: str) -> bool:
    """Whether the process of that name may still run; False only for one of this machine that is gone."""
    host, _, rest = holder.rpartition(":")[0].rpartition(":")
    if host != _host() or not rest.isdigit():
        return True
    try:
        os.kill(int(rest), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        pass
    return True


def _host() -> str:
    return clean(socket.gethostname(), 80) or "unknown"
