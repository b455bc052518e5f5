"""Glowplug's Textual themes and stylesheets. Imports nothing else of Glowplug.

A theme is a TOML file of named colours beside this module; Textual is imported
only when one is loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import tomllib

if TYPE_CHECKING:
    from textual.theme import Theme

DARK = "glowplug-dark"
LIGHT = "glowplug-light"
NAMES = (DARK, LIGHT)
"""Our own, in the order in which they are offered; the first is the default."""

_DIRECTORY = Path(__file__).parent
_COLOURS = (
    "primary",
    "secondary",
    "warning",
    "error",
    "success",
    "accent",
    "foreground",
    "background",
    "surface",
    "panel",
)


def load(name: str) -> Theme:
    """Return one of `NAMES`. Raises: ValueError naming the file and the key that is missing or too much."""
    from textual.theme import Theme

    path = _DIRECTORY / f"{name}.toml"
    content = tomllib.loads(path.read_text(encoding="utf-8"))
    colours = content.get("colours", {})
    if wrong := {*_COLOURS} ^ {*colours}:
        raise ValueError(f"{path}: [colours] must have exactly {', '.join(_COLOURS)}; see {', '.join(sorted(wrong))}")
    return Theme(
        name=name, dark=bool(content["dark"]), variables=dict(content.get("variables", {})), **colours
    )  # fmt: skip


def stylesheets() -> list[Path]:
    """Return every stylesheet, in the order in which they apply."""
    return [_DIRECTORY / name for name in ("roles.tcss", "screens.tcss", "ascii.tcss")]
