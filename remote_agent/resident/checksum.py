"""A checksum of samples: cheap enough to compare at each attach, on whatever device the bytes are.

It finds memory that is another model's, was given back, or was overwritten at large; one changed byte it may miss.
"""

from __future__ import annotations

import ctypes
import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

SAMPLES = 64
SAMPLE_BYTES = 4096


def sample_offsets(size_bytes: int) -> tuple[int, ...]:
    """Return where samples begin: spread evenly, the first and the last of ``size_bytes`` among them."""
    last = max(0, size_bytes - SAMPLE_BYTES)
    return tuple(dict.fromkeys(last * number // (SAMPLES - 1) for number in range(SAMPLES)))


def sampled_checksum(memory: torch.Tensor, size_bytes: int) -> str:
    """Return the checksum of the first ``size_bytes`` of ``memory``, a flat uint8 tensor on any device."""
    return Samples(memory, size_bytes).checksum()


class Samples:
    """The samples of one piece of memory, as views; whatever is mapped there when they are asked counts."""

    def __init__(self, memory: torch.Tensor, size_bytes: int) -> None:
        ends = ((offset, min(offset + SAMPLE_BYTES, size_bytes)) for offset in sample_offsets(size_bytes))
        self._parts = [memory[start:end] for start, end in ends]
        self._size_bytes = size_bytes

    def checksum(self) -> str:
        """Return what `sampled_checksum` returns of the memory as it is now."""
        import torch

        samples = torch.cat(self._parts).cpu()  # one copy from the device, not one a sample
        digest = hashlib.blake2b(f"{self._size_bytes}:".encode(), digest_size=16)
        digest.update(ctypes.string_at(samples.data_ptr(), samples.nbytes))
        return digest.hexdigest()
