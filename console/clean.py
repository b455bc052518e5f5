"""Turns what a host says into text that is safe to show, in a terminal as in a file.

The rules, in order:

- bytes are read as UTF-8, what can't be decoded becomes U+FFFD; so do lone surrogates;
- whole escape sequences (CSI, OSC, DCS, APC, PM, SOS and the short ones, with ESC or as
  8-bit C1) are taken out; a string sequence reaches to its terminator, the next ESC or the end;
- line breaks at the end go, others become ``⏎``; a tab or any other space becomes a space;
- zero-width characters, variation selectors and fillers are dropped;
- every other character that does not print (controls, DEL, bidi, format, private use,
  unassigned) becomes U+FFFD;
- at most two combining marks follow a character, and none leads;
- more than ``limit`` characters are cut, with ``…`` as the last one.

What comes out passes unchanged when it is cleaned again.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
import unicodedata
from collections.abc import Mapping
from typing import Any, TypeVar, cast

T = TypeVar("T")

LINE_LIMIT = 500
RECORD_LIMIT = 4096
"""Paths are up to 4096 long and must survive in records; views cut what they show."""
DEPTH_LIMIT = 64

_BAD = "\ufffd"
_BREAK = "⏎"
_ELLIPSIS = "…"
_MARKS_KEPT = 2
_SEQUENCE = re.compile(
    r"(?:\x1b[PX\]^_]|[\x90\x98\x9d\x9e\x9f])"  # DCS SOS OSC PM APC: a string up to its terminator
    r"[^\x07\x18\x1a\x1b\x9c]*(?:[\x07\x18\x1a\x9c]|\x1b\\|(?=\x1b)|\Z)"
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*(?:[@-~]|\Z)"  # CSI
    r"|\x1b[ -/]*[0-~]"  # the short ones: charset, reset, save, restore
)
_BREAKS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
_DROPPED = frozenset(
    itertools.chain(
        (0xAD, 0x34F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x3164, 0xFEFF, 0xFFA0, 0x1D159),
        range(0x180B, 0x1810),
        range(0x200B, 0x200E),
        range(0x2060, 0x2065),
        range(0xFE00, 0xFE10),
        range(0xE0100, 0xE01F0),
    )
)


def clean(text: str | bytes, limit: int = LINE_LIMIT) -> str:
    """Return ``text`` as one line that is safe to show, at most ``limit`` (at least 1) characters long."""
    if isinstance(text, bytes):
        text = text[: 4 * _looked_at(limit) + 4].decode("utf-8", "replace")
    if len(text) <= limit and text.isascii() and text.isprintable():
        return text
    looked_at = text[: _looked_at(limit)]
    if looked_at.isascii() and looked_at.isprintable():
        return _cut(looked_at, limit)
    cleaned = _clean_slowly(text, limit)
    return text if cleaned == text else cleaned


def clean_lines(text: str | bytes, limit_lines: int = 200, limit: int = LINE_LIMIT) -> tuple[str, ...]:
    """Return the last ``limit_lines`` lines of ``text``, each cleaned, empty ones left out."""
    if isinstance(text, bytes):
        text = text.decode("utf-8", "replace")
    lines = (clean(line, limit) for line in re.split(f"[{_BREAKS}]+", text))
    return tuple(line for line in lines if line.strip())[-limit_lines:]


def clean_record(value: T, limit: int = RECORD_LIMIT) -> T:
    """Return ``value`` with every text in it cleaned: dataclasses, mappings, tuples and lists of the wire types.

    The very same object where nothing had to change. Lists that change become tuples;
    what is nested deeper than any wire type becomes ``…``. Never raises: a dataclass
    was checked when it was decoded, and is not checked again.
    """
    return cast(T, _clean_value(value, limit, DEPTH_LIMIT))


def _looked_at(limit: int) -> int:
    """How many characters are worth reading: a hostile text may be megabytes long."""
    return 16 * limit + 4096


def _clean_slowly(text: str, limit: int) -> str:
    cut = len(text) > _looked_at(limit)
    text = text[: _looked_at(limit)]
    text = _SEQUENCE.sub("", text).rstrip(_BREAKS)
    shown: list[str] = []
    marks = _MARKS_KEPT
    for character in text:
        if not " " <= character <= "~":
            character, is_mark = _replace(character)
            if is_mark:
                if marks >= _MARKS_KEPT:
                    character = "" if shown else _BAD
                marks += 1
            elif character:
                marks = 0
        else:
            marks = 0
        if character:
            shown.append(character)
        if len(shown) > limit:
            break
    return _cut("".join(shown), limit) if cut or len(shown) > limit else "".join(shown)


def _cut(text: str, limit: int) -> str:
    return text[: limit - 1].rstrip() + _ELLIPSIS


def _replace(character: str) -> tuple[str, bool]:
    """Return what stands for a character outside printable ASCII, and whether it is a combining mark."""
    if ord(character) in _DROPPED:
        return "", False
    if character in _BREAKS:
        return _BREAK, False
    if character == "\t" or character == "\u2800":
        return " ", False
    category = unicodedata.category(character)
    if category == "Zs":
        return " ", False
    if category in ("Mn", "Me"):
        return character, True
    return (character if character.isprintable() else _BAD), False


@functools.cache
def _field_names(cls: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(cls))


def _clean_value(value: object, limit: int, depth: int) -> object:
    if type(value) is str:
        return clean(value, limit)
    if value is None or type(value) in (int, float, bool):
        return value
    if depth == 0:
        return _ELLIPSIS
    if dataclasses.is_dataclass(value):
        return _clean_dataclass(value, limit, depth)
    if isinstance(value, (tuple, list)):
        items = [_clean_value(item, limit, depth - 1) for item in value]
        same = all(new is old for new, old in zip(items, value, strict=True))
        return value if same else tuple(items)
    if isinstance(value, Mapping):
        return _clean_mapping(value, limit, depth)
    return value


def _clean_dataclass(value: Any, limit: int, depth: int) -> object:
    cls: Any = type(value)
    names = _field_names(cls)
    changed: dict[str, object] = {}
    for name in names:
        old = getattr(value, name)
        new = _clean_value(old, limit, depth - 1)
        if new is not old:
            changed[name] = new
    if not changed:
        return value
    copy = object.__new__(cls)
    for name in names:
        object.__setattr__(copy, name, changed.get(name, getattr(value, name)))
    return copy


def _clean_mapping(value: Mapping[object, object], limit: int, depth: int) -> Mapping[object, object]:
    cleaned = {_clean_value(key, limit, depth - 1): _clean_value(item, limit, depth - 1) for key, item in value.items()}
    same = len(cleaned) == len(value) and all(
        new_key is key and cleaned[new_key] is item for new_key, (key, item) in zip(cleaned, value.items(), strict=True)
    )
    return value if same else cleaned
