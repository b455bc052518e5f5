"""Memory of a model that outlives the process that filled it: what the CPU's and a GPU's have in common."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from remote_agent.resident.reserved import ReservedRange


class SharedMemory(Protocol):
    """Memory behind a descriptor, mapped here. The map lasts as long as a tensor on it, whatever else is closed."""

    @property
    def size_bytes(self) -> int:
        """Return how much there is: at least what was asked for."""

    @property
    def tensor(self) -> torch.Tensor:
        """Return all of it as one flat uint8 tensor; writable until `seal`."""

    @property
    def range(self) -> ReservedRange | None:
        """Return the addresses at which it can be unmapped and mapped again; None where it can't."""

    def seal(self) -> None:
        """Make it read-only, here and for whoever maps it. Raises: DeviceError"""

    def export(self) -> int:
        """Return a new descriptor of it, the caller's to close. Raises: DeviceError"""

    def close(self) -> None:
        """Let go of the descriptor. Safe to call again."""


class Mapping:
    """An address range that is given back with its last user: whoever has a tensor there keeps this object."""

    def __init__(self, address: int, size_bytes: int, give_back: Callable[[], None]) -> None:
        """``give_back`` is called once, from whichever thread lets go last; never at the interpreter's end."""
        self.address, self.size_bytes = address, size_bytes
        weakref.finalize(self, give_back).atexit = False  # tensors may still be used then; the kernel tidies up
