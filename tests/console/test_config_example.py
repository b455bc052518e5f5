"""The configuration that `glowplug config example` prints: valid, and every key is in it."""

from __future__ import annotations

import dataclasses
import re
import typing
from pathlib import Path
from typing import Any

import pytest
import tomllib

from console.config import EXAMPLE, load, parse
from console.config_nodes import DefaultsTable, NodeTable
from console.rollout.settings import Rollout
from remote_agent.protocol.messages import Recipe


def test_the_example_is_valid_and_explains_every_key(tmp_path: Path) -> None:
    """What `glowplug config example` prints can be used as it is."""
    path = tmp_path / "fleet.toml"
    path.write_text(EXAMPLE)
    config = load(path)

    assert [node.name for node in config.nodes] == ["gpu-1", "gpu-2", "gpu-3", "pod-1"]
    assert set(config.recipes) == {"llama", "chat", "llama-files", "embed"}
    assert config.recipes["llama"].name == "llama"
    assert config.node("gpu-3").hops[0].port == 2222
    assert config.node("gpu-3").hops[0].user == "ops"
    assert config.node("pod-1").transport[0] == "kubectl"


def test_the_example_with_its_commented_lines_is_valid_too(tmp_path: Path) -> None:
    """A commented setting works once its `#` is taken away."""
    lines = [line[2:] if line.startswith("# ") and " = " in line else line for line in EXAMPLE.splitlines()]
    text = "\n".join(lines).replace('"~/.ssh/fleet"', f'"{tmp_path}/key"')
    text += '\n[nodes.bastion]\nhost = "192.0.2.1"\n'
    (tmp_path / "key").write_text("a key")
    config = parse(text, tmp_path / "fleet.toml")

    assert config.node("gpu-1").user == "ops"
    assert config.node("gpu-1").hops[0].name == "bastion"
    assert config.node("bastion").hops == ()
    assert config.node("gpu-1").known_hosts == (str(tmp_path / "known_hosts"),)


def uncommented() -> dict[str, Any]:
    """Return the example's tables, its commented settings too."""
    return tomllib.loads("\n".join(re.sub(r"^# (?=\w+ = )", "", line) for line in EXAMPLE.splitlines()))


def keys_of(kind: type, path: str = "") -> set[str]:
    """Return the dotted keys that a table of ``kind`` may hold, those of tables in it too."""
    hints = typing.get_type_hints(kind)
    keys = set()
    for field in dataclasses.fields(kind):
        inner = [
            one for one in (hints[field.name], *typing.get_args(hints[field.name])) if dataclasses.is_dataclass(one)
        ]
        keys |= {f"{path}{field.name}"}.union(*(keys_of(one, f"{path}{field.name}.") for one in inner))  # type: ignore[arg-type]
    return keys


def keys_in(table: dict[str, Any], path: str = "") -> set[str]:
    """Return the dotted keys that stand in a table."""
    keys = set()
    for key, value in table.items():
        inner = [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, dict)]
        keys |= {f"{path}{key}"}.union(*(keys_in(one, f"{path}{key}.") for one in inner))
    return keys


@pytest.mark.parametrize(
    ("table", "kind", "left_out"),
    [
        ("defaults", DefaultsTable, set()),
        ("nodes", NodeTable, set()),
        ("recipes", Recipe, {"name"}),
        ("rollout", Rollout, set()),
    ],
)
def test_the_example_has_every_key_that_there_is(table: str, kind: type, left_out: set[str]) -> None:
    """A field that is added must be explained; a recipe's name is its table's."""
    content = uncommented()[table]
    tables = content if isinstance(content, list) else list(content.values())
    written = [content] if table == "defaults" else tables

    assert keys_of(kind) - left_out - set().union(*map(keys_in, written)) == set()
