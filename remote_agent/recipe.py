"""Reads recipes from TOML or JSON and gives each its content hash."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from remote_agent.errors import RecipeError
from remote_agent.protocol.codec import DecodeError, Unknown, decode, encode
from remote_agent.protocol.messages import Recipe


def recipe_hash(recipe: Recipe) -> str:
    """Return the first 16 hex digits of the SHA-256 of the recipe's content, its name left out.

    Values of ``environment`` count by name only, so that a secret never shows in a hash.
    """
    content = encode(recipe)
    del content["name"]
    content["environment"] = sorted(content["environment"])
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def read_recipe(path: Path) -> Recipe:
    """Return the recipe in a ``.toml`` or ``.json`` file; its name defaults to the file's.

    Raises: RecipeError with every problem of the file.
    """
    try:
        content = _parse(path)
    except OSError as error:
        raise RecipeError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise RecipeError(f"{path}: {error}") from error
    if isinstance(content, dict):
        content.setdefault("name", path.stem)
    try:
        return decode(Recipe, content, Unknown.REFUSE)
    except DecodeError as error:
        raise RecipeError("\n".join(f"{path}: {problem}" for problem in error.problems)) from error


def _parse(path: Path) -> object:
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".toml":
        return json.loads(text)
    try:
        import tomllib
    except ImportError:
        raise ValueError("TOML recipes need Python 3.11 or newer here; give the recipe as JSON") from None
    return tomllib.loads(text)
