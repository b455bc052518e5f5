"""A checksum of samples: cheap enough to compare at each attach, on whatever device the bytes are.

It finds memory that is another model's, was given back, or was overwritten at large; one changed byte it may miss.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

SAMPLES = 64
SAMPLE_BYTES = 4096


def sample_offsets(size_bytes: int) -> tuple[int, ...]:
    """Return where samples begin: spread evenly, the first and the last of ``size_bytes`` among them."""
    last = max(0, size_bytes - SAMPLE_BYTES)
    return (*range(0, last, max(1, last // (SAMPLES - 1)))[: SAMPLES - 1], last)


def sampled_checksum(memory: torch.Tensor, size_bytes: int) -> str:
    """Return the checksum of the first ``size_bytes`` of ``memory``, a flat uint8 tensor on any device."""
    return Samples(memory, size_bytes).checksum()


class Samples:
    """The samples of one piece of memory; whatever is mapped there when they are asked counts."""

    def __init__(self, memory: torch.Tensor, size_bytes: int) -> None:
        self._memory, self._size_bytes = memory, size_bytes
        self._offsets, self._length = sample_offsets(size_bytes), min(SAMPLE_BYTES, size_bytes)
        self._parts = None if memory.device.type == "cpu" else views_of_samples(memory, self._offsets, self._length)

    def checksum(self) -> str:
        """Return what `sampled_checksum` returns of the memory as it is now."""
        digest = hashlib.blake2b(f"{self._size_bytes}:".encode(), digest_size=16)
        if self._parts is None:
            for offset in self._offsets:
                digest.update(ctypes.string_at(self._memory.data_ptr() + offset, self._length))
        else:
            digest.update(joined(self._parts))
        return digest.hexdigest()


def views_of_samples(memory: torch.Tensor, offsets: Sequence[int], length: int) -> list[torch.Tensor]:
    """Return views of the samples, in a row; all but the last stand at one distance."""
    last = memory[offsets[-1] : offsets[-1] + length]
    if len(offsets) == 1:
        return [last]
    return [memory.as_strided((len(offsets) - 1, length), (offsets[1], 1), memory.storage_offset()), last]


def joined(parts: Sequence[torch.Tensor]) -> bytes:
    """Return the bytes of ``parts`` in a row, by one copy from their device."""
    import torch

    samples = torch.cat([part.reshape(-1) for part in parts]).cpu()
    return ctypes.string_at(samples.data_ptr(), samples.nbytes)
