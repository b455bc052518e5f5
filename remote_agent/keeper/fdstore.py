"""systemd's descriptor store: with it residents outlive the keeper's own restart.

Used where the service manager says so by NOTIFY_SOCKET (``FileDescriptorStoreMax=`` above 0). Protocol:
sd_notify(3) and sd_listen_fds(3). A store keeps no order, so each name says which descriptor of how many it is.
"""

from __future__ import annotations

import os
import re
import socket
from collections import defaultdict
from collections.abc import Mapping, MutableMapping, Sequence

from remote_agent.keeper.complaint import complain
from remote_agent.keeper.holdings import DESCRIPTORS_MAX, DESCRIPTORS_MIN, NAME

FIRST_DESCRIPTOR = 3
NOTIFY_S = 0.1
"""How long a service manager that reads nothing may hold up one message, and so everybody who asks."""

_STORED = re.compile(r"(.+),([0-9]{1,2}),([0-9]{1,2})")


class DescriptorStore:
    """Implements `holdings.Store`; does nothing where no service manager listens."""

    def __init__(self, address: str | None) -> None:
        self._address = None if not address else "\0" + address[1:] if address[0] == "@" else address

    def keep(self, name: str, descriptors: Sequence[int]) -> None:
        """Hand a resident's descriptors to the store as well."""
        for index, descriptor in enumerate(descriptors):
            stored = f"{name},{index},{len(descriptors)}"
            # FDPOLL=0: a descriptor of memory that reports a hang-up must not be thrown out.
            self._notify(f"FDSTORE=1\nFDNAME={stored}\nFDPOLL=0", [descriptor])

    def forget(self, name: str, count: int) -> None:
        """Take a resident's descriptors out of the store."""
        for index in range(count):
            self._notify(f"FDSTOREREMOVE=1\nFDNAME={name},{index},{count}")

    def say_ready(self) -> None:
        self._notify("READY=1")

    def _notify(self, text: str, descriptors: Sequence[int] = ()) -> None:
        if self._address is None:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as link:
                link.settimeout(NOTIFY_S)
                link.connect(self._address)
                if descriptors:
                    socket.send_fds(link, [text.encode("ascii")], list(descriptors))
                else:
                    link.send(text.encode("ascii"))
        except OSError as error:
            complain(f"the service manager's socket: {error}")


def take_stored(environment: MutableMapping[str, str]) -> dict[str, tuple[int, ...]]:
    """Return the residents that the store kept, whole ones only; what is torn or unknown is closed.

    The variables are taken out of ``environment``: they are meant for this process alone.
    """
    pid, count, names = (environment.pop(key, "") for key in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"))
    if pid != str(os.getpid()) or not count.isdigit():
        return {}
    descriptors = range(FIRST_DESCRIPTOR, FIRST_DESCRIPTOR + int(count))
    found: dict[str, dict[int, int]] = defaultdict(dict)
    sizes: dict[str, set[int]] = defaultdict(set)
    for descriptor, stored in zip(descriptors, names.split(":"), strict=False):
        match = _STORED.fullmatch(stored)
        if match and NAME.fullmatch(match[1]) and int(match[2]) not in found[match[1]]:
            os.set_inheritable(descriptor, False)
            found[match[1]][int(match[2])] = descriptor
            sizes[match[1]].add(int(match[3]))
    whole = {name: _in_order(parts, sizes[name]) for name, parts in found.items()}
    residents = {name: parts for name, parts in whole.items() if parts is not None}
    _close_others(descriptors, residents)
    return residents


def _in_order(parts: Mapping[int, int], sizes: set[int]) -> tuple[int, ...] | None:
    is_whole = sizes == {len(parts)} and set(parts) == set(range(len(parts)))
    if not is_whole or not DESCRIPTORS_MIN <= len(parts) <= DESCRIPTORS_MAX:
        return None
    return tuple(parts[index] for index in range(len(parts)))


def _close_others(descriptors: range, residents: Mapping[str, Sequence[int]]) -> None:
    kept = {descriptor for parts in residents.values() for descriptor in parts}
    for descriptor in descriptors:
        if descriptor not in kept:
            try:
                os.close(descriptor)
            except OSError:
                pass  # fewer came than were announced
