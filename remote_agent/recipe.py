"""Reads recipes from TOML or JSON and gives each its content hash."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from dataclasses import replace
from pathlib import Path

from remote_agent.errors import RecipeError
from remote_agent.protocol.codec import DecodeError, Unknown, decode, encode
from remote_agent.protocol.messages import FirstRequest, Hold, Recipe, Serve

LIMIT_BYTES = 1 << 20

ANY_SERVER = Serve("any:server", 1)
"""In place of a recipe's own where all that counts is that it has one: its weights lie where others can attach."""


def recipe_hash(recipe: Recipe) -> str:
    """Return the first 16 hex digits of the SHA-256 of the recipe's content, its name left out.

    Values of ``environment`` count by name only, so that a secret never shows in a hash.
    """
    content = encode(recipe)
    del content["name"]
    if recipe.serve is None:  # such recipes have the hashes that history knows them by
        del content["serve"]
    content["environment"] = sorted(content["environment"])
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def warm_hash(recipe: Recipe) -> str:
    """Return what must be equal for a standby to be what a recipe makes: how it is served makes no other."""
    return recipe_hash(recipe if recipe.serve is None else replace(recipe, serve=ANY_SERVER))


def armed_hash(recipe: Recipe) -> str:
    """Return what must be equal for a process that is armed for one recipe to take another's weights.

    Requests may differ where nothing is compiled: what is compiled was compared with eager at the request's shapes.
    """
    if recipe.compile.mode == "off":
        request = FirstRequest(kind=recipe.request.kind)
        recipe = replace(recipe, request=request, deadlines={}, hold=Hold())
    return f"armed {warm_hash(recipe)}"


def model_hash(recipe: Recipe) -> str:
    """Return 16 hex digits that recipes have in common which load the same files, whatever they make of them."""
    return hashlib.sha256(json.dumps(encode(recipe.model), sort_keys=True).encode()).hexdigest()[:16]


def read_recipe(path: Path) -> Recipe:
    """Return the recipe in a ``.toml`` or ``.json`` file; its name defaults to the file's.

    Raises: RecipeError with every problem of the file.
    """
    try:
        content = _parse(path)
    except OSError as error:
        raise RecipeError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise RecipeError(f"{path}: {error}") from error
    if isinstance(content, dict):
        content.setdefault("name", path.stem)
    try:
        return decode(Recipe, content, Unknown.REFUSE)
    except DecodeError as error:
        raise RecipeError("\n".join(f"{path}: {problem}" for problem in error.problems)) from error


def resolve_paths(recipe: Recipe, folder: Path) -> Recipe:
    """Return the recipe with its relative paths taken from ``folder``; ``~`` is left to the agent."""
    model = replace(recipe.model, path=_resolve(recipe.model.path, folder))
    cache = recipe.compile.cache_directory
    compiling = replace(recipe.compile, cache_directory=_resolve(cache, folder)) if cache else recipe.compile
    serve = recipe.serve
    if serve is not None and serve.path is not None:
        serve = replace(serve, path=_resolve(serve.path, folder))
    return replace(recipe, model=model, compile=compiling, serve=serve)


def _resolve(path: str, folder: Path) -> str:
    return path if path.startswith("~") else str((folder / path).absolute())


def _parse(path: Path) -> object:
    text = _read(path).decode("utf-8")
    if path.suffix != ".toml":
        return json.loads(text)
    try:
        import tomllib
    except ImportError:
        raise ValueError("TOML recipes need Python 3.11 or newer here; give the recipe as JSON") from None
    return tomllib.loads(text)


def _read(path: Path) -> bytes:
    """Return the content of a regular file; nothing that could block or never end is read."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("a recipe must be a regular file")
        content = file.read(LIMIT_BYTES + 1)
    size_bytes = max(found.st_size, len(content))
    if size_bytes > LIMIT_BYTES:
        raise ValueError(f"{size_bytes:,} bytes: a recipe has at most {LIMIT_BYTES:,}")
    return content
