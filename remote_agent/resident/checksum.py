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
    offsets, length = sample_offsets(size_bytes), min(SAMPLE_BYTES, size_bytes)
    digest = hashlib.blake2b(f"{size_bytes}:".encode(), digest_size=16)
    if memory.device.type == "cpu":
        for offset in offsets:
            digest.update(ctypes.string_at(memory.data_ptr() + offset, length))
    else:
        digest.update(samples_on_device(memory, offsets, length))
    return digest.hexdigest()


def samples_on_device(memory: torch.Tensor, offsets: Sequence[int], length: int) -> bytes:
    """Return the samples in a row, by one copy from the device; all but the last stand at one distance."""
    import torch

    parts = [memory[offsets[-1] : offsets[-1] + length]]
    if len(offsets) > 1:
        evenly = memory.as_strided((len(offsets) - 1, length), (offsets[1], 1), memory.storage_offset())
        parts.insert(0, evenly.reshape(-1))
    samples = torch.cat(parts).cpu()
    return ctypes.string_at(samples.data_ptr(), samples.nbytes)
