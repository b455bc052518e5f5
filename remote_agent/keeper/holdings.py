"""The residents: names, the descriptors behind them, and who has them mapped."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Protocol

DESCRIPTORS_MIN, DESCRIPTORS_MAX = 2, 16
"""Of one resident: its manifest and few large pieces of memory."""

TOTAL_MAX = 512
"""Descriptors of all residents."""

LEASES_MAX = 256
LEASES_OF_OTHERS_MAX = 192
"""What users whom ``attach.allow`` lets in may have between them: the rest is the owner's."""

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,127}")


class Refused(Exception):
    """A word that is understood and not done; its text is the answer."""


class Lease(Protocol):
    """Somebody attached, for as long as it is open. ``is_owner``: who may drop residents as well."""

    @property
    def pid(self) -> int: ...

    @property
    def is_owner(self) -> bool: ...

    def close(self) -> None: ...


class Store(Protocol):
    """Keeps descriptors beyond the keeper's own end; `fdstore.DescriptorStore` is one."""

    def keep(self, name: str, descriptors: Sequence[int]) -> None: ...

    def forget(self, name: str, count: int) -> None: ...


class _Resident:
    def __init__(self, descriptors: tuple[int, ...]) -> None:
        self.descriptors = descriptors
        self.leases: dict[Lease, None] = {}


class Holdings:
    """Owns every descriptor it was given, until the resident is dropped."""

    def __init__(self, store: Store, found: Mapping[str, Sequence[int]]) -> None:
        """``found``: what the store kept of a keeper before."""
        self._store = store
        self._residents = {name: _Resident(tuple(descriptors)) for name, descriptors in found.items()}

    @property
    def count(self) -> int:
        return len(self._residents)

    def lines(self) -> list[str]:
        """Return a line a resident, as ``list`` answers."""
        return [
            " ".join([name, str(len(resident.descriptors)), *(str(lease.pid) for lease in resident.leases)])
            for name, resident in self._residents.items()
        ]

    def put(self, name: str, descriptors: Sequence[int]) -> None:
        """Hold ``descriptors`` as ``name``; they are the caller's still if this raises. Raises: Refused"""
        if not NAME.fullmatch(name):
            raise Refused(f"{name[:80]!r} is no name: 1..128 letters, digits, '.', '_', '@', '+' or '-'")
        if not DESCRIPTORS_MIN <= len(descriptors) <= DESCRIPTORS_MAX:
            raise Refused(f"{len(descriptors)} descriptors came: {DESCRIPTORS_MIN}..{DESCRIPTORS_MAX} make a resident")
        if name in self._residents:
            raise Refused(f"{name} is held already: drop it first")
        total = sum(len(resident.descriptors) for resident in self._residents.values())
        if total + len(descriptors) > TOTAL_MAX:
            raise Refused(f"no room: {total} of {TOTAL_MAX} descriptors are held")
        self._residents[name] = _Resident(tuple(descriptors))
        self._store.keep(name, descriptors)

    def manifest(self, name: str) -> int:
        """Return the manifest's descriptor. Raises: Refused"""
        return self._find(name).descriptors[0]

    def attach(self, name: str, lease: Lease) -> tuple[int, ...]:
        """Return every descriptor of a resident, which is attached from now on. Raises: Refused"""
        resident = self._find(name)
        leases = [one.is_owner for held in self._residents.values() for one in held.leases]
        if len(leases) >= LEASES_MAX:
            raise Refused(f"no room: {LEASES_MAX} are attached to this keeper's residents")
        if not lease.is_owner and leases.count(False) >= LEASES_OF_OTHERS_MAX:
            raise Refused(f"no room: {LEASES_OF_OTHERS_MAX} of other users are attached to this keeper's residents")
        resident.leases[lease] = None
        return resident.descriptors

    def detach(self, lease: Lease) -> None:
        """Take note that a lease has ended."""
        for resident in self._residents.values():
            resident.leases.pop(lease, None)

    def drop(self, name: str, force: bool) -> None:
        """Close what is held as ``name``. Raises: Refused, while it is attached and not ``force``"""
        resident = self._find(name)
        if resident.leases and not force:
            pids = ", ".join(dict.fromkeys(str(lease.pid) for lease in resident.leases))
            raise Refused(f"{name} is attached by {len(resident.leases)}, processes: {pids}")
        del self._residents[name]
        self._store.forget(name, len(resident.descriptors))
        for lease in list(resident.leases):
            lease.close()
        for descriptor in resident.descriptors:
            os.close(descriptor)

    def drop_all(self) -> None:
        """Close everything, attached or not, in the store as well: a keeper that follows must not have it again."""
        for name in list(self._residents):
            self.drop(name, force=True)

    def _find(self, name: str) -> _Resident:
        found = self._residents.get(name)
        if found is None:
            raise Refused(f"no resident {name[:80]!r}")
        return found
