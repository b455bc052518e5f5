"""Recipe files: what is read, what is refused, and where relative paths start."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from remote_agent.errors import RecipeError
from remote_agent.protocol.messages import CompilePolicy, Hold, ModelSource, Recipe, Serve
from remote_agent.recipe import LIMIT_BYTES, model_hash, read_recipe, recipe_hash, resolve_paths, warm_hash


def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    """Nobody writes to it, so that reading it would wait for ever."""
    path = tmp_path / "pipe.json"
    os.mkfifo(path)

    with pytest.raises(RecipeError, match=r"pipe\.json: a recipe must be a regular file"):
        read_recipe(path)


@pytest.mark.parametrize("path", ["/dev/zero", "/dev"])
def test_a_device_or_a_directory_is_refused(path: str) -> None:
    """A device may have no end."""
    with pytest.raises(RecipeError, match=f"{path}: (a recipe must be a regular file|Is a directory)"):
        read_recipe(Path(path))


def test_a_large_file_is_refused_with_its_size(tmp_path: Path) -> None:
    """One byte over the limit is enough; the limit itself is read."""
    path = tmp_path / "large.json"
    text = '{"model": {"path": "/m"}}'
    path.write_text(text.ljust(LIMIT_BYTES))
    assert read_recipe(path).name == "large"

    path.write_text(text.ljust(LIMIT_BYTES + 1))
    with pytest.raises(RecipeError, match=r"large\.json: 1,048,577 bytes: a recipe has at most 1,048,576"):
        read_recipe(path)


@pytest.mark.parametrize("content", [b"\xff", b"[" * 100_000])
def test_what_cannot_be_parsed_names_the_file(tmp_path: Path, content: bytes) -> None:
    """Bytes that are no text and brackets without end are problems of the file."""
    path = tmp_path / "bad.json"
    path.write_bytes(content)

    with pytest.raises(RecipeError, match=r"bad\.json: "):
        read_recipe(path)


@pytest.mark.parametrize(
    ("path", "resolved"), [("m", "/recipes/m"), ("../m", "/recipes/../m"), ("/m", "/m"), ("~/m", "~/m")]
)
def test_relative_paths_start_at_the_folder_given(path: str, resolved: str) -> None:
    """The model's and the compile cache's; absolute ones and the home directory stay."""
    recipe = Recipe("r", ModelSource(path), compile=CompilePolicy("layer", path))

    found = resolve_paths(recipe, Path("/recipes"))

    assert (found.model.path, found.compile.cache_directory) == (resolved, resolved)
    assert resolve_paths(Recipe("r", ModelSource(path)), Path("/recipes")).compile.cache_directory is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ('"target_tier": "host", "devices": ["cpu"]', "target_tier: host registers files with a GPU"),
        ('"target_tier": "cached", "serve": {"entry": "a:b", "port": 1}', "serve: needs a model, and target_tier is"),
        ('"devices": ["cpu", "cuda:0"], "serve": {"entry": "a:b", "port": 1}', "serve: one process serves one device"),
        ('"hold": {"lock": true}', "hold.lock: locks the page cache at target_tier cached, and target_tier is standby"),
    ],
)
def test_a_tier_that_can_never_be_reached_is_refused(tmp_path: Path, change: str, words: str) -> None:
    """What does not fit together is said when the recipe is read, before any host is asked."""
    path = tmp_path / "r.json"
    path.write_text(f'{{"model": {{"path": "/m"}}, {change}}}')

    with pytest.raises(RecipeError, match=words):
        read_recipe(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ('"entry": "serve"', "serve.entry: 'serve' is not module:function"),
        ('"entry": "a:b", "port": 70000', "serve.port: 70000 is not within 1..65535"),
        ('"entry": "a:b", "host": "a b"', "serve.host: 'a b' is neither a name nor an address"),
        ('"entry": "a:b", "health": "ok"', "serve.health: 'ok' is no path of a URL"),
        ('"entry": "a:b", "request": {"path": "/a b"}', "serve.request.path: '/a b' is no path of a URL"),
        ('"entry": "a:b", "request": {"body": {"x": NaN}}', "serve.request.body: is no JSON"),
        ('"entry": "a:b", "ready_timeout_s": 0', "serve.ready_timeout_s: 0 is not within 0..86400 seconds"),
    ],
)
def test_what_can_t_serve_is_refused_by_name(tmp_path: Path, change: str, words: str) -> None:
    """Each value of its own, before any host is asked."""
    path = tmp_path / "r.json"
    path.write_text(f'{{"model": {{"path": "/m"}}, "serve": {{"port": 1, {change}}}}}')

    with pytest.raises(RecipeError, match=re.escape(words)):
        read_recipe(path)


def test_how_a_model_is_served_makes_no_other_standby() -> None:
    """Whether it is served does, for then its weights lie where others can attach; history tells every recipe apart."""
    plain = Recipe("a", ModelSource("/m"))
    one, other = replace(plain, serve=Serve("a:b", 1)), replace(plain, serve=Serve("c:d", 2))

    assert warm_hash(one) == warm_hash(other) != warm_hash(plain) == recipe_hash(plain)
    assert recipe_hash(one) != recipe_hash(other)
    assert recipe_hash(plain) == "ccaf9225de023cc4", "what history knows it by"


def test_recipes_of_one_model_have_its_hash_in_common() -> None:
    """What they make of its files, and for how long, is each recipe's own."""
    first = Recipe("a", ModelSource("/m"), target_tier="host")
    second = Recipe("b", ModelSource("/m"), dtype="float16", hold=Hold(ttl_s=1))

    assert model_hash(first) == model_hash(second)
    assert model_hash(first) != model_hash(Recipe("a", ModelSource("/m", "main")))
    assert recipe_hash(first) != recipe_hash(second)
