"""``fleet.toml``: nodes, recipes, rollouts and defaults, read into frozen objects, every mistake reported at once.

A mistake reads ``file:line: path: what``. What may follow ``[nodes.NAME]`` is in `config_nodes`, what may follow
``[recipes.NAME]`` is the wire's own `Recipe`, and ``[[rollout]]`` is `console.rollout.settings`.
"""

from __future__ import annotations

import fnmatch
import re
import shlex
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import tomllib

from console.clean import clean
from console.config_example import EXAMPLE
from console.config_lines import hint, key_lines, line_of
from console.config_nodes import Defaults, DefaultsTable, Node, NodeTable, build_defaults, build_nodes
from console.config_rollouts import name_problems, rollout_tables
from console.config_storage import storage_limits
from console.errors import ConfigError, UsageError
from console.rollout.settings import Rollout
from remote_agent.protocol.codec import DecodeError, Problem, Unknown, decode
from remote_agent.protocol.messages import Recipe

__all__ = ["EXAMPLE", "Config", "Defaults", "Node", "load", "parse"]

T = TypeVar("T")

SIZE_LIMIT_BYTES = 1 << 20
_TABLES: dict[str, type] = {
    "defaults": DefaultsTable,
    "nodes": NodeTable,
    "recipes": Recipe,
    "rollout": Rollout,
    "storage_groups": dict,
}


@dataclass(frozen=True)
class Config:
    """A whole ``fleet.toml``; nodes in the file's order, every name that is referred to exists.

    ``storage_groups``: how many loads at one time, for each group that a node is in.
    """

    nodes: tuple[Node, ...] = ()
    recipes: Mapping[str, Recipe] = field(default_factory=dict)
    defaults: Defaults = field(default_factory=Defaults)
    rollouts: tuple[Rollout, ...] = ()
    storage_groups: Mapping[str, int] = field(default_factory=dict)
    path: Path = Path("fleet.toml")

    def node(self, name: str) -> Node:
        """Return the node of that very name. Raises: UsageError, naming close matches."""
        for node in self.nodes:
            if node.name == name:
                return node
        raise UsageError(f"no node {clean(name, 80)!r}{hint(name, [node.name for node in self.nodes])}")

    def recipe(self, name: str) -> Recipe:
        """Return the recipe of that name. Raises: UsageError, naming close matches."""
        if name in self.recipes:
            return self.recipes[name]
        raise UsageError(f"no recipe {clean(name, 80)!r}{hint(name, list(self.recipes))}")

    def rollout(self, name: str) -> Rollout:
        """Return the rollout of that name. Raises: UsageError, naming close matches."""
        for rollout in self.rollouts:
            if rollout.name == name:
                return rollout
        raise UsageError(f"no rollout {clean(name, 80)!r}{hint(name, [one.name for one in self.rollouts])}")

    def select(self, names_or_tags: Sequence[str]) -> tuple[Node, ...]:
        """Return the nodes that any selector names, each once, in the file's order.

        A selector is a name, ``tag:NAME``, ``all``, or a pattern with ``* ? [`` for either.

        Raises: UsageError for a selector that names no node, with close matches.
        """
        chosen: set[str] = set()
        for selector in names_or_tags:
            found = {node.name for node in self.nodes if _matches(node, selector)}
            if not found:
                raise UsageError(self._nothing_matches(selector))
            chosen |= found
        return tuple(node for node in self.nodes if node.name in chosen)

    def _nothing_matches(self, selector: str) -> str:
        if not self.nodes:
            return f"{self.path} has no nodes"
        candidates = [node.name for node in self.nodes] + sorted(
            {f"tag:{tag}" for node in self.nodes for tag in node.tags}
        )
        return f"no node matches {clean(selector, 80)!r}{hint(selector, candidates)}"


def load(path: Path) -> Config:
    """Return the configuration in ``path``.

    Raises: ConfigError with every mistake of the file, or why it can't be read.
    """
    try:
        if path.is_dir():
            raise ConfigError([f"{path}: is a directory, not a file"])
        if path.exists() and not path.is_file():
            raise ConfigError([f"{path}: is not a regular file"])
        with path.open("rb") as file:
            content = file.read(SIZE_LIMIT_BYTES + 1)
    except FileNotFoundError as error:
        folder, target = shlex.quote(str(path.parent)), shlex.quote(str(path))
        advice = f"`mkdir -p {folder} && glowplug config example > {target}` writes one to start from"
        raise ConfigError([f"{path}: no such file; {advice}"]) from error
    except OSError as error:
        raise ConfigError([f"{path}: {error.strerror}"]) from error
    except ValueError as error:
        raise ConfigError([clean(f"{path}: {error}")]) from error
    if len(content) > SIZE_LIMIT_BYTES:
        raise ConfigError([f"{path}: is over {SIZE_LIMIT_BYTES} bytes, no fleet.toml is that long"])
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError([f"{path}:{line}: is not UTF-8 text: byte 0x{content[error.start]:02x}"]) from error
    return parse(text, path)


def parse(text: str, path: Path) -> Config:
    """Return the configuration that ``text`` is; ``path`` is for messages and relative file names.

    Raises: ConfigError with every mistake.
    """
    raw = _read_toml(text, path)
    problems: list[Problem] = []
    problems += [Problem(key, "unknown key") for key in raw if key not in _TABLES]
    defaults_table = _decode_table(DefaultsTable, raw.get("defaults", {}), "defaults", problems) or DefaultsTable()
    recipes = _decode_recipes(_table(raw, "recipes", problems), problems)
    tables = {
        name: _decode_table(NodeTable, value, f"nodes.{name}", problems)
        for name, value in _table(raw, "nodes", problems).items()
    }
    defaults = build_defaults(defaults_table, path.parent, problems)
    nodes = build_nodes(tables, defaults_table, path.parent, problems)
    storage_groups = storage_limits(_table(raw, "storage_groups", problems, "a table [{}]"), nodes, problems)
    rollouts = [
        _decode_table(Rollout, value, f"rollout[{index}]", problems)
        for index, value in enumerate(rollout_tables(raw, problems))
    ]
    known_recipes = list(_table(raw, "recipes", []))
    for name, table in tables.items():
        problems += _absent_recipes(name, table, known_recipes)
    problems += name_problems(rollouts, known_recipes)
    if problems:
        raise ConfigError(_describe(problems, text, path))
    return Config(nodes, recipes, defaults, tuple(filter(None, rollouts)), storage_groups, path)


def _read_toml(text: str, path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        match = re.search(r" \(at line (\d+), column (\d+)\)$", str(error))
        what = str(error)[: match.start()] if match else str(error).removesuffix(" (at end of document)")
        line = int(match.group(1)) if match else max(1, len(text.splitlines()))
        raise ConfigError([clean(f"{path}:{line}: not TOML: {what}")]) from error
    except (RecursionError, ValueError) as error:
        raise ConfigError([clean(f"{path}: not TOML that can be read: {error}")]) from error


def _table(
    raw: Mapping[str, Any], key: str, problems: list[Problem], expected: str = "tables [{}.NAME]"
) -> Mapping[str, Any]:
    value = raw.get(key, {})
    if isinstance(value, Mapping):
        return value
    problems.append(Problem(key, f"expected {expected.format(key)}"))
    return {}


def _decode_table(cls: type[T], value: object, path: str, problems: list[Problem]) -> T | None:
    """Return ``value`` as a ``cls``; without the keys that are wrong, so that the others are checked too."""
    try:
        return decode(cls, value, Unknown.REFUSE, path)
    except DecodeError as error:
        problems.extend(error.problems)
        wrong = {re.split(r"[.\[]", problem.path[len(path) + 1 :])[0] for problem in error.problems}
    if not isinstance(value, Mapping) or not wrong & value.keys():
        return None
    return _decode_table(cls, {key: item for key, item in value.items() if key not in wrong}, path, [])


def _decode_recipes(tables: Mapping[str, Any], problems: list[Problem]) -> dict[str, Recipe]:
    recipes = {}
    for name, value in tables.items():
        path = f"recipes.{name}"
        if isinstance(value, Mapping):
            if "name" in value:
                problems.append(Problem(f"{path}.name", "a recipe's name is the name of its table"))
            value = {**value, "name": name}
        recipe = _decode_table(Recipe, value, path, problems)
        if recipe is not None:
            recipes[name] = recipe
    return recipes


def _absent_recipes(name: str, table: NodeTable | None, known: list[str]) -> list[Problem]:
    if table is None:
        return []
    return [
        Problem(f"nodes.{name}.recipes[{index}]", f"no recipe {recipe!r}{hint(recipe, known)}")
        for index, recipe in enumerate(table.recipes or ())
        if recipe not in known
    ]


def _describe(problems: list[Problem], text: str, path: Path) -> list[str]:
    lines = key_lines(text)
    told = {}
    for problem in problems:
        what = problem.text
        if what == "unknown key":
            table, _, key = problem.path.rpartition(".")
            what += hint(key, _known_keys(table))
        line = line_of(lines, problem.path)
        where = re.sub(r"[^.\[\]]{81,}", lambda part: f"{part[0][:79]}…", problem.path)
        told[clean(f"{path}:{line}: {clean(where, 300)}: {clean(what)}", 1000)] = line
    return sorted(told, key=lambda text: told[text])


def _known_keys(table: str) -> list[str]:
    """Return the keys that the table at that path may have."""
    if not table:
        return list(_TABLES)
    top, *rest = table.split(".")
    cls: Any = _TABLES.get(top.partition("[")[0])
    for key in rest if top == "defaults" or top.startswith("rollout[") else rest[1:]:
        kind = typing.get_type_hints(cls).get(key.partition("[")[0]) if is_dataclass(cls) else None
        cls = next((item for item in (kind, *typing.get_args(kind)) if is_dataclass(item)), None)
    return [item.name for item in fields(cls)] if cls is not None and is_dataclass(cls) else []


def _matches(node: Node, selector: str) -> bool:
    if selector == "all":
        return True
    if selector.startswith("tag:"):
        return any(fnmatch.fnmatchcase(tag, selector[4:]) for tag in node.tags)
    return fnmatch.fnmatchcase(node.name, selector)
