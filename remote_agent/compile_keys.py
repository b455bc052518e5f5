"""What compiled code depends on, as named parts, and which of them differ between two warm-ups.

Pure: a key is a flat mapping of part names to text. Parts of a model's configuration are named
``config.NAME``; everything else by a plain word, such as ``torch`` or ``driver``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import TypeVar

Key = Mapping[str, str]
Change = tuple[str, str | None, str | None]
"""A part's name, its value before and its value now; None where it has none."""

CONFIG = "config."
VALUE_LIMIT = 80
CHANGES_SHOWN = 4
DIGEST_DIGITS = 32

T = TypeVar("T")


def digest_key(key: Key) -> str:
    """Return 32 hexadecimal digits that are equal for equal keys alone, whatever the order of their parts."""
    return digest_text(json.dumps(dict(sorted(key.items())), separators=(",", ":")))


def digest_text(text: str, digits: int = DIGEST_DIGITS) -> str:
    """Return the first ``digits`` hexadecimal digits of the text's SHA-256."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:digits]


def shorten(value: str) -> str:
    """Return ``value`` on one line of at most 80 characters; what is cut ends in a digest, so that it still differs."""
    line = " ".join(value.split())
    if len(line) <= VALUE_LIMIT and line == value:
        return value
    end = f"… ({digest_text(value, 8)})"
    return line[: VALUE_LIMIT - len(end)] + end


def flatten_config(content: Mapping[str, object], without: Iterable[str] = ()) -> dict[str, str]:
    """Return a configuration's values as parts of a key, each named ``config.NAME``; ``without`` is left out."""
    left_out = frozenset(without)
    return {
        f"{CONFIG}{name}": shorten(value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str))
        for name, value in content.items()
        if name not in left_out
    }


def list_changes(before: Key, now: Key) -> tuple[Change, ...]:
    """Return the parts that differ, in the order of ``now``, those that are gone last."""
    names = dict.fromkeys((*now, *before))
    return tuple((name, before.get(name), now.get(name)) for name in names if before.get(name) != now.get(name))


def choose_nearest(key: Key, candidates: Iterable[tuple[Key, T]]) -> T | None:
    """Return what comes with the key that has the fewest differing parts, the first of several; None of nothing."""
    nearest = min(
        ((len(list_changes(other, key)), position, value) for position, (other, value) in enumerate(candidates)),
        key=lambda found: found[:2],
        default=None,
    )
    return None if nearest is None else nearest[2]


def tell_changes(changes: tuple[Change, ...]) -> str:
    """Return the changes as one bounded line: ``torch 2.11.0 → 2.13.0, num_hidden_layers 32 → 40 and 3 more``."""
    told = ", ".join(_tell(change) for change in changes[:CHANGES_SHOWN])
    rest = len(changes) - CHANGES_SHOWN
    return f"{told} and {rest} more" if rest > 0 else told


def _tell(change: Change) -> str:
    name, before, now = change
    shown = name[len(CONFIG) :] if name.startswith(CONFIG) else name
    return f"{shorten(shown)} {_value(before)} → {_value(now)}"


def _value(value: str | None) -> str:
    if value is None:
        return "(none)"
    return shorten(value) or "(empty)"
