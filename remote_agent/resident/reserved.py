"""A reserved address range of a device: tensors keep their addresses while the memory under them is exchanged.

What is built over it (a module, a CUDA graph) stays right whatever lies there: a *stand-in*, one small piece of memory
mapped over and over; the weights behind a descriptor, read-only; or nothing, around a driver checkpoint.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from remote_agent.errors import DeviceError
from remote_agent.resident.memory import Mapping

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)


class RangeState(enum.Enum):
    """What lies in a range. ``BROKEN``: the driver did not take something away; only its process's end tidies up."""

    NOTHING = "nothing"
    STAND_IN = "stand-in"
    WEIGHTS = "weights"
    BROKEN = "broken"


class Place(Protocol):
    """Addresses of one device, and the calls that put memory there. Nothing but `close` may be called after it."""

    @property
    def address(self) -> int: ...

    @property
    def size_bytes(self) -> int: ...

    @property
    def stand_in_bytes(self) -> int:
        """Return the memory that the stand-in takes, mapped or not; 0 once it is given back."""

    def open(self, descriptor: int, size_bytes: int) -> Any:
        """Return the memory behind a descriptor, which may be closed then. Raises: ResidentLostError"""

    def forget(self, memory: Any) -> None:
        """Let go of what `open` gave; where it is mapped it stays until `clear`. Never raises."""

    def put(self, memory: Any, size_bytes: int) -> None:
        """Map memory read-only at the beginning of what is cleared. Raises: DeviceError, and may leave a part."""

    def put_stand_in(self) -> None:
        """Map the stand-in, to read and write, over all of what is cleared. Raises: DeviceError, and may leave a part.

        Memory is made for it where it has none.
        """

    def drop_stand_in(self) -> None:
        """Give the stand-in's memory back once it is not mapped. Never raises."""

    def clear(self) -> None:
        """Unmap whatever is mapped, when nothing on the device uses it any more. Raises: DeviceError"""

    def close(self) -> None:
        """Give everything back, the addresses too. Never raises."""


class ReservedRange:
    """One range. The addresses are given back with the last tensor on it, and what was mapped there before them.

    Whatever fails, ``state`` says what lies there; to touch ``tensor`` where nothing does ends the process.
    """

    def __init__(
        self,
        place: Place,
        to_tensor: Callable[[Mapping], torch.Tensor],
        lies_there: RangeState = RangeState.STAND_IN,
        on_gone: Callable[[], None] = lambda: None,
    ) -> None:
        """Put the stand-in there, unless ``lies_there`` says that weights were put there already, or nothing is to be.

        ``on_gone`` is called once such weights are unmapped. Raises: DeviceError, and everything of ``place`` is given
        back.
        """
        self._place, self._to_tensor, self._lease = place, to_tensor, _Lease(on_gone)
        if lies_there is RangeState.STAND_IN:
            try:
                place.put_stand_in()
            except BaseException:
                place.close()
                raise
        self.state = lies_there
        self._mapping = Mapping(place.address, place.size_bytes, _closing(place, self._lease))
        self._tensor: torch.Tensor | None = None

    @property
    def tensor(self) -> torch.Tensor:
        """Return the range as one flat uint8 tensor; something must lie there when it is first asked for."""
        if self._tensor is None:
            self._tensor = self._to_tensor(self._mapping)
        return self._tensor

    @property
    def size_bytes(self) -> int:
        return self._place.size_bytes

    @property
    def stand_in_bytes(self) -> int:
        """Return what the stand-in takes of the device's memory now."""
        return self._place.stand_in_bytes

    def map(self, descriptor: int, size_bytes: int, on_gone: Callable[[], None] = lambda: None) -> dict[str, int]:
        """Put ``size_bytes`` behind a descriptor there, read-only, in place of the stand-in or of nothing.

        Returns nanoseconds by step: ``import``, ``unmap``, ``map``. ``on_gone`` is called once it is unmapped; not
        when this raises: then what lay there lies there again, or nothing where that fails too.
        Raises: ResidentLostError if the driver does not know the memory any more, DeviceError for anything else
        """
        if self.state not in (RangeState.NOTHING, RangeState.STAND_IN):
            raise DeviceError(f"the range holds {self.state.value}: nothing is mapped over that", "map", "range_state")
        if size_bytes > self.size_bytes:
            text = f"{size_bytes} bytes do not fit a range of {self.size_bytes}"
            raise DeviceError(text, "map", "range_too_small")
        before, clock = self.state, time.monotonic_ns
        begun = clock()
        memory = self._place.open(descriptor, size_bytes)
        opened = clock()
        try:
            self._clear()
            cleared = clock()
            self._place.put(memory, size_bytes)
        except BaseException:
            self._put_back(before)
            raise
        finally:
            self._place.forget(memory)
        self.state, self._lease.on_gone = RangeState.WEIGHTS, on_gone
        return {"import": opened - begun, "unmap": cleared - opened, "map": clock() - cleared}

    def unmap(self, *, stand_in: bool) -> None:
        """Take away what lies there, for the stand-in or for nothing at all; weights can be mapped again after both.

        Raises: DeviceError if it could not be taken away, or if the stand-in can't be had: then nothing lies there
        """
        if self.state is RangeState.BROKEN:
            raise DeviceError("the range is broken: what lies there can't be taken away", "unmap", "range_state")
        self._clear()
        if stand_in:
            self._put_stand_in()

    @contextlib.contextmanager
    def or_stand_in(self) -> Iterator[None]:
        """Have the stand-in there again if the block raises; where that fails too, ``state`` says what lies there."""
        try:
            yield
        except BaseException:
            if self.state is not RangeState.STAND_IN:
                self._put_back(RangeState.STAND_IN)
            raise

    def drop_stand_in(self) -> None:
        """Give the stand-in's memory back while weights, or nothing, lie there; `unmap` makes it anew when asked."""
        if self.state is not RangeState.STAND_IN:
            self._place.drop_stand_in()

    def _clear(self) -> None:
        try:
            self._place.clear()
        except BaseException:
            self.state = RangeState.BROKEN
            raise
        self.state = RangeState.NOTHING
        self._lease.end()

    def _put_stand_in(self) -> None:
        try:
            self._place.put_stand_in()
        except BaseException:
            self._clear()
            raise
        self.state = RangeState.STAND_IN

    def _put_back(self, before: RangeState) -> None:
        """After a failure: clear what may be there in part, and have the stand-in there if it was."""
        try:
            self._clear()
            if before is RangeState.STAND_IN:
                self._put_stand_in()
        except DeviceError as error:
            log.warning("a range holds %s: %s", self.state.value, str(error))  # a record keeps no frames


class _Lease:
    """Who is to be told that the weights were unmapped; apart from the range, which its own tensor must not keep."""

    def __init__(self, on_gone: Callable[[], None]) -> None:
        self.on_gone = on_gone

    def end(self) -> None:
        on_gone, self.on_gone = self.on_gone, lambda: None
        on_gone()


def _closing(place: Place, lease: _Lease) -> Callable[[], None]:
    def give_back() -> None:
        place.close()
        lease.end()

    return give_back
