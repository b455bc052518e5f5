"""Turns bytes that are where they belong into torch tensors, without copying them."""

from __future__ import annotations

import torch

from remote_agent.loader.dtypes import DTYPES
from remote_agent.loader.headers import TensorEntry


def torch_dtype(entry: TensorEntry) -> torch.dtype | None:
    """Return the torch dtype of a tensor, or None where this torch has none that fits its shape."""
    dtype = DTYPES[entry.dtype]
    found = None if dtype.torch_name is None else getattr(torch, dtype.torch_name, None)
    if dtype.packed > 1 and (not entry.shape or entry.shape[-1] % dtype.packed):
        return None
    return found if isinstance(found, torch.dtype) else None


def view_of(content: torch.Tensor, entry: TensorEntry) -> torch.Tensor:
    """Return ``content``, the uint8 bytes of ``entry``, as what it stands for.

    A dtype that this torch does not have stays a flat uint8 tensor of its bytes. ``content`` must
    begin at a multiple of the dtype's size.
    """
    dtype = torch_dtype(entry)
    if dtype is None:
        return content
    shape = list(entry.shape)
    if DTYPES[entry.dtype].packed > 1:
        shape[-1] //= DTYPES[entry.dtype].packed
    return content.view(dtype).view(shape) if entry.nbytes else content.new_empty(shape, dtype=dtype)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor as a flat uint8 tensor on the CPU."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
