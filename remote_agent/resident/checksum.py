"""A checksum of samples: cheap enough to compare at each attach, on whatever device the bytes are.

It finds memory that is another model's, was given back, or was overwritten at large; one changed byte it may miss.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from remote_agent.devices.calls import Calls

if TYPE_CHECKING:
    import torch

RUNTIME = "cuda.bindings.runtime"
SAMPLES = 64
SAMPLE_BYTES = 4096
PITCH_LIMIT_BYTES = (1 << 31) - 1
"""``cudaDevAttrMaxPitch``: how far apart the rows of one copy may lie."""


def sample_offsets(size_bytes: int) -> tuple[int, ...]:
    """Return where samples begin: spread evenly, the first and the last of ``size_bytes`` among them."""
    last = max(0, size_bytes - SAMPLE_BYTES)
    return (*range(0, last, max(1, last // (SAMPLES - 1)))[: SAMPLES - 1], last)


def sampled_checksum(memory: torch.Tensor, size_bytes: int) -> str:
    """Return the checksum of the first ``size_bytes`` of ``memory``, a flat uint8 tensor on any device."""
    offsets, length = sample_offsets(size_bytes), min(SAMPLE_BYTES, size_bytes)
    if memory.device.type == "cpu":
        address = memory.data_ptr()
        return digest(size_bytes, (ctypes.string_at(address + offset, length) for offset in offsets))
    import torch

    with torch.cuda.device(memory.device):  # an attacher's own may be another, which has no access to this memory
        return digest(size_bytes, [copy_samples(Calls(RUNTIME), memory.data_ptr(), offsets, length)])


def copy_samples(runtime: Calls, address: int, offsets: Sequence[int], length: int) -> bytes:
    """Return ``length`` bytes from each offset of a GPU's memory, in a row. All but the last stand at one distance.

    Copies need no kernel, of which the first of a kind takes a process 20 ms; one call for all takes half as long as
    one for each. Raises: DeviceError
    """
    here = ctypes.create_string_buffer(length * len(offsets))
    target, kind = ctypes.addressof(here), runtime.module.cudaMemcpyKind.cudaMemcpyDeviceToHost
    pitch = offsets[1] - offsets[0] if len(offsets) > 1 else 0
    done = 0
    if length <= pitch <= PITCH_LIMIT_BYTES:
        done = len(offsets) - 1
        runtime("cudaMemcpy2D", target, length, address + offsets[0], pitch, length, done, kind)
    for number in range(done, len(offsets)):
        runtime("cudaMemcpy", target + number * length, address + offsets[number], length, kind)
    return here.raw


def digest(size_bytes: int, samples: Iterable[bytes]) -> str:
    """Return the checksum of ``samples``, in their order, of memory of that size; how they are cut does not count."""
    made = hashlib.blake2b(f"{size_bytes}:".encode(), digest_size=16)
    for sample in samples:
        made.update(sample)
    return made.hexdigest()


class Samples:
    """The samples of one piece of memory, read again and again; whatever is mapped there when they are queued counts.

    On a GPU they come by a stream of their own: other work neither waits for them nor they for it.
    """

    def __init__(self, memory: torch.Tensor, size_bytes: int) -> None:
        self._memory, self._size_bytes = memory, size_bytes
        self._reader = None if memory.device.type == "cpu" else SampleReader(memory, size_bytes)

    def queue(self) -> None:
        """Have a device read them from now on; a CPU reads when asked."""
        if self._reader is not None:
            self._reader.queue()

    def checksum(self) -> str:
        """Wait for what was queued, and return what `sampled_checksum` returns of the memory as it was then."""
        if self._reader is None:
            return sampled_checksum(self._memory, self._size_bytes)
        return digest(self._size_bytes, [self._reader.wait()])


class SampleReader:
    """Copies samples of a GPU's memory to one place there, and from that to pinned memory, without waiting."""

    def __init__(self, memory: torch.Tensor, size_bytes: int) -> None:
        import torch

        offsets, length = sample_offsets(size_bytes), min(SAMPLE_BYTES, size_bytes)
        parts = views_of_samples(memory, offsets, length)
        self._stream = torch.cuda.Stream(memory.device, priority=-1)  # type: ignore[no-untyped-call]
        self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            self._there = torch.empty(sum(part.numel() for part in parts), dtype=torch.uint8, device=memory.device)
        self._here = torch.empty(self._there.shape, dtype=torch.uint8, pin_memory=True)
        places = torch.split(self._there, [part.numel() for part in parts])
        self._copies = [(place.view(part.shape), part) for place, part in zip(places, parts, strict=True)]

    def queue(self) -> None:
        """Have the samples read as they are now."""
        import torch

        with torch.cuda.stream(self._stream):
            for place, part in self._copies:
                place.copy_(part)
            self._here.copy_(self._there, non_blocking=True)
            self._arrived.record(self._stream)

    def wait(self) -> bytes:
        """Return the samples that were queued, in a row."""
        self._arrived.synchronize()
        return ctypes.string_at(self._here.data_ptr(), self._here.nbytes)


def views_of_samples(memory: torch.Tensor, offsets: Sequence[int], length: int) -> list[torch.Tensor]:
    """Return views of the samples, in a row; all but the last stand at one distance."""
    last = memory[offsets[-1] : offsets[-1] + length]
    if len(offsets) == 1:
        return [last]
    return [memory.as_strided((len(offsets) - 1, length), (offsets[1], 1), memory.storage_offset()), last]
