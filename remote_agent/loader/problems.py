"""What can be wrong with a checkpoint, as data: a stable code, where, and one line for a person.

Codes of a file that is not what its name says:
  ``not_found dangling_link link_loop not_regular unreadable empty_file too_short zero_filled
  lfs_pointer pickle torch_zip html gguf not_safetensors``
Codes of a header, before or against its file:
  ``header_too_large header_beyond_file bad_header bad_metadata duplicate_name unknown_dtype
  bad_shape bad_offsets size_mismatch overlap hole truncated file_too_long``
Codes of a set of files:
  ``no_safetensors ambiguous missing_shard missing_tensor wrong_shard duplicate_tensor
  bad_index index_path revision_not_found``
Codes of a native run's other files:
  ``no_config no_tokenizer``
A code keeps its meaning; new ones may be added.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

LISTED_NAMES = 20
"""How many names one line spells out before it only counts."""


@dataclass(frozen=True)
class CheckpointProblem:
    """One reason to refuse. ``file`` is relative to the checkpoint; ``detail`` is one printable line."""

    code: str
    file: str | None
    tensor: str | None
    detail: str

    def __str__(self) -> str:
        """The line that a person reads; the detail names the tensor where one is concerned."""
        where = f"{shown(self.file)}: " if self.file is not None else ""
        return f"{where}{self.detail} [{self.code}]"


def shown(text: str, limit: int = 160) -> str:
    """Return ``text`` on one printable line: control and unpaired characters escaped, the middle cut."""
    if len(text) > limit:
        text = f"{text[: limit // 2]}…{text[-(limit // 2) :]}"
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
        for character in text
    )


def listed(names: Iterable[str], limit: int = LISTED_NAMES) -> str:
    """Return the first names, joined, and how many more there are."""
    every = list(names)
    head = ", ".join(shown(name) for name in every[:limit])
    return head if len(every) <= limit else f"{head} and {len(every) - limit} more"


def counted(count: int, noun: str) -> str:
    """Return ``1 tensor`` or ``3 tensors``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def in_one_unit(*sizes_bytes: int) -> list[str]:
    """Return sizes that are to be compared, all in the unit of the largest."""
    for unit, unit_bytes in (("GB", 10**9), ("MB", 10**6)):
        if max(sizes_bytes) >= 10 * unit_bytes:
            return [f"{size_bytes / unit_bytes:.2f} {unit}" for size_bytes in sizes_bytes]
    return [f"{size_bytes} bytes" for size_bytes in sizes_bytes]


def gigabytes(size_bytes: int) -> str:
    """Return a size in words; a small one to the byte."""
    return f"{size_bytes / 1e9:.2f} GB" if size_bytes >= 10**7 else f"{size_bytes} bytes"
