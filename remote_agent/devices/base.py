"""What every device can do, whatever it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol, Union

if TYPE_CHECKING:
    import torch

    from remote_agent.resident.memory import SharedMemory
    from remote_agent.resident.reserved import ReservedRange

Fact = Union[int, float, str, bool, None]

Replay = Callable[[], None]
"""Does captured work once more, on the same memory; queued where the device queues."""


class Device(Protocol):
    """A place where tensors live. Methods raise DeviceError naming the call and its code.

    Order of use: ``initialise`` (driver only), ``open_context``, anything else, ``close``.
    """

    @property
    def name(self) -> str:
        """Return the name it was opened by: ``cpu``, ``cuda:N`` or a GPU UUID."""

    @property
    def kind(self) -> str:
        """Return ``cpu`` or ``cuda``."""

    @property
    def torch_device(self) -> torch.device:
        """Return where torch has it."""

    def initialise(self) -> Mapping[str, Fact]:
        """Initialise the driver, open no context, and return facts. Safe to call again."""

    def open_context(self) -> Mapping[str, Fact]:
        """Open what bytes need to get there, and return facts. Safe to call again."""

    def synchronise(self) -> None:
        """Wait for everything queued on the device."""

    def memory(self) -> tuple[int, int]:
        """Return free and total bytes."""

    def pool_bytes(self) -> int:
        """Return what torch's allocator has of the device's memory, in use or not; 0 where that is not counted."""

    def share(self, size_bytes: int) -> SharedMemory:
        """Return memory that can outlive this process, at least ``size_bytes`` of it."""

    def map_shared(self, descriptor: int, size_bytes: int, on_gone: Callable[[], None]) -> torch.Tensor:
        """Return shared memory behind a descriptor, which may be closed then, as a flat uint8 tensor to read.

        ``on_gone`` is called when nothing uses it any more. Raises: ResidentLostError, `on_gone` is not called then.
        """

    def reserve(self, size_bytes: int, stand_in: bool = True) -> ReservedRange:
        """Return addresses for at least ``size_bytes``, as much as `share` gives, with a stand-in or nothing there."""

    @property
    def has_graphs(self) -> bool:
        """Whether `capture` is to be had."""

    def capture(self, work: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Replay]:
        """Return what ``work`` gives and how to do it again without Python.

        ``work`` runs a few times, at first without being captured. Each replay writes the returned tensor anew.
        Raises: RuntimeError, DeviceError if it can't be captured.
        """

    def close(self) -> None:
        """Give back what ``open_context`` took. Safe to call again."""
