"""Turns bytes that are where they belong into torch tensors, without copying them."""

from __future__ import annotations

from collections.abc import Iterable

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


def views_in(memory: torch.Tensor, places: Iterable[tuple[TensorEntry, int]]) -> dict[str, torch.Tensor]:
    """Return a view of ``memory``, flat uint8, for each tensor that begins at the given byte of it.

    Each must begin at a multiple of its dtype's size. One call of torch makes a view: thousands are made at once.
    """
    flats: dict[str, tuple[torch.Tensor, int, int] | None] = {}
    strides: dict[tuple[int, ...], tuple[int, ...]] = {}
    views: dict[str, torch.Tensor] = {}
    for entry, start in places:
        name, dtype, shape = entry.name, entry.dtype, entry.shape
        if dtype not in flats:
            flats[dtype] = _flat(memory, dtype)
        found = flats[dtype]
        if found is None or entry.start == entry.end:
            views[name] = view_of(memory[start : start + entry.nbytes], entry)
            continue
        if shape not in strides:
            strides[shape] = _contiguous(shape)
        flat, item_bytes, first = found
        views[name] = flat.as_strided(shape, strides[shape], first + start // item_bytes)
    return views


def _flat(memory: torch.Tensor, name: str) -> tuple[torch.Tensor, int, int] | None:
    """Return all of ``memory`` as one dtype, the size of an item and the number in its storage of the first.

    None where each tensor is a case of its own.
    """
    found = DTYPES[name]
    dtype = None if found.torch_name is None else getattr(torch, found.torch_name, None)
    if found.packed > 1 or not isinstance(dtype, torch.dtype):
        return None
    flat = memory[: len(memory) // found.item_bytes * found.item_bytes].view(dtype)
    return flat, found.item_bytes, int(flat.storage_offset())


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor, in elements."""
    strides = [1] * len(shape)
    for place in range(len(shape) - 2, -1, -1):
        strides[place] = strides[place + 1] * shape[place + 1]
    return tuple(strides)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor as a flat uint8 tensor on the CPU."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
