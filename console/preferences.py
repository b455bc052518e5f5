"""What the console keeps of its own looks between two starts: the theme. Operators may add keys to the file.

``{"theme": "glowplug-dark", "keys": {"fleet.warm": "f5"}}``
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

logger = logging.getLogger(__name__)

SIZE_LIMIT_BYTES = 1 << 16


@dataclass(frozen=True)
class Preferences:
    """``keys`` maps ids of actions to keys, several joined by commas."""

    theme: str | None = None
    keys: Mapping[str, str] = field(default_factory=dict)


def load(path: Path | None) -> Preferences:
    """Return what the file says; what it does not say, or not rightly, is as if it had never been set."""
    content = _read(path)
    theme, keys = content.get("theme"), content.get("keys")
    fitting = {id: key for id, key in keys.items() if isinstance(key, str) and key} if isinstance(keys, dict) else {}
    return Preferences(theme if isinstance(theme, str) else None, fitting)


def save_theme(path: Path | None, theme: str) -> bool:
    """Keep ``theme`` for the next start, in one step, leaving the rest of the file; False if it can't be written."""
    if path is None:
        return True
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_text(json.dumps({**_read(path), "theme": theme}, indent=2) + "\n", encoding="utf-8")
        fresh.replace(path)
    except OSError as error:
        logger.warning("the theme could not be kept in %s: %s", path, error)
        return False
    return True


def _read(path: Path | None) -> dict[str, object]:
    if path is None:
        return {}
    try:
        with path.open("rb") as file:
            content = json.loads(file.read(SIZE_LIMIT_BYTES))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
