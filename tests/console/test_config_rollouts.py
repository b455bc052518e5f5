"""[[rollout]] of fleet.toml: what is read, what is refused, and on which line."""

from __future__ import annotations

from pathlib import Path

import pytest

from console.config import Config, parse
from console.errors import ConfigError, UsageError

BASE = '[nodes.a]\n[recipes.llama]\nmodel = { path = "/m" }\n'
LEAST = '[[rollout]]\nname = "r"\nselector = "all"\nrecipe = "llama"\n'
"""Begins on line 4 behind `BASE`."""


def problems(text: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        parse(BASE + text, Path("fleet.toml"))
    return list(error.value.problems)


def config(text: str) -> Config:
    return parse(BASE + text, Path("fleet.toml"))


def test_the_least_rollout_has_careful_defaults() -> None:
    """One node at a time, and the first failure aborts."""
    rollout = config(LEAST).rollout("r")

    assert (rollout.max_unavailable, rollout.max_failures, rollout.retries) == (1, 1, 0)
    assert (rollout.serial, rollout.canary, rollout.selectors) == (("100%",), None, ("all",))
    assert rollout.hooks.names == ()


def test_every_mistake_is_named_with_its_line() -> None:
    """All at once, each in its own table, in the order of the file."""
    text = (
        LEAST.replace('"llama"', '"lama"')
        + 'serial = [1, "120%"]\nmax_failure = 2\nretries = -1\n'
        + '[[rollout.gates]]\nmeasure = "wieghts"\nlimit_s = 1\ncout = 3\n'
        + "[[rollout.gates]]\n"
        + "[rollout.hooks]\nshift = { argv = [], timeout = 3 }\n"
    )
    told = problems(text)

    assert [line.removeprefix("fleet.toml:") for line in told] == [
        "7: rollout[0].recipe: no recipe 'lama'; did you mean llama?",
        "8: rollout[0].serial[1]: '120%' is neither a number of nodes nor a percentage from 1% to 100%",
        "9: rollout[0].max_failure: unknown key; did you mean max_failures or max_unavailable?",
        "10: rollout[0].retries: -1 is not within 0..100",
        "12: rollout[0].gates[0].measure: 'wieghts' is not one of: total, first_output, queue, probe, preflight, init,"
        " context, weights, assign, compile, first_request, hold, listening",
        "14: rollout[0].gates[0].cout: unknown key; did you mean count?",
        "15: rollout[0].gates[1]: exactly one of measure, tier, command and http is needed, not none",
        "17: rollout[0].hooks.shift.timeout: unknown key; did you mean timeout_s?",
        "17: rollout[0].hooks.shift.argv: name at least one argument",
    ]


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("serial = []", "serial: name at least one size"),
        ('max_unavailable = "0%"', "max_unavailable: '0%' is neither"),
        ("max_failures = 0", "max_failures: 0 must be at least 1"),
        ("canary = 0", "canary: 0 must be at least 1"),
        ('order = "hottest"', "order: 'hottest' is not one of: as_listed, coldest_first, tag:NAME"),
        ('order = ["tag:"]', "order: 'tag:' is not one of"),
        ("progress_deadline_s = 0", "progress_deadline_s: 0 s is not above 0"),
        ("node_timeout_s = -1", "node_timeout_s: -1 s is not above 0"),
        ("pause_after = [0]", "pause_after[0]: 0 is no batch"),
        ("colour = 1", "colour: unknown key"),
        ('gates = [{ tier = "hot" }]', "gates[0].tier: 'hot' is not one of: cold"),
        ('gates = [{ measure = "total" }]', "gates[0].measure: needs limit_s or factor, and has neither"),
        ('gates = [{ measure = "total", limit_s = 1, factor = 2 }]', "needs limit_s or factor, not both"),
        ('gates = [{ tier = "host", limit_s = 1 }]', "gates[0].limit_s: is for a gate with measure"),
        ('gates = [{ tier = "host", http = "http://x" }]', "not tier and http"),
        ('gates = [{ http = "ftp://x" }]', "gates[0].http: 'ftp://x' is not an http"),
        ('gates = [{ http = "http://x:99999/" }]', "'http://x:99999/' is not an http:// or https:// address"),
        ('gates = [{ http = "http://ada:pw@x/" }]', "names a user; the gate logs in nowhere"),
        ('gates = [{ http = "http://{hots}/" }]', "'{hots}' is no placeholder; there are {node} and {host}"),
        ('gates = [{ http = "http://{host/" }]', "'{host/' is no placeholder"),
        ('gates = [{ http = "http://x/}" }]', "'}' is no placeholder"),
        ('gates = [{ measure = "total", limit_s = 1e300 }]', "limit_s: 1e+300 s is not above 0 and at most 604800"),
        ('gates = [{ measure = "total", factor = 1e300 }]', "factor: 1e+300 is not above 0 and at most 1000"),
        ('gates = [{ command = [""] }]', "gates[0].command[0]: '' is empty"),
        ('gates = [{ tier = "host", count = 2, failure_limit = 2 }]', "failure_limit: 2 is not within 0..1"),
        ('gates = [{ tier = "host", count = 2, consecutive_success = 3 }]', "3 is not within 1..2"),
        ('hooks = { shift = { argv = ["/x"] } }', "hooks.on_abort: is required beside shift"),
        ('hooks = { before_shift = "/x" }', "hooks.before_shift: expected a table, got text"),
        ('hooks = { shfit = { argv = ["/x"] } }', "hooks.shfit: unknown key; did you mean shift?"),
    ],
)
def test_a_value_that_can_not_be_is_refused_on_its_line(line: str, what: str) -> None:
    """One mistake, one problem."""
    (told,) = problems(LEAST + line)

    assert told.startswith("fleet.toml:8: rollout[0].")
    assert what in told


def test_what_is_missing_is_named() -> None:
    """A table without anything lacks all that is required."""
    assert [line.split(": ", 1)[1] for line in problems("[[rollout]]\n")] == [
        f"rollout[0].{key}: is required" for key in ("name", "selector", "recipe")
    ]


def test_single_brackets_are_said_to_be_too_few() -> None:
    """A rollout's name is a key of it, unlike a node's."""
    (told,) = problems('[rollout.r]\nselector = "all"\n')

    assert told == "fleet.toml:4: rollout: expected tables [[rollout]], in double brackets"


def test_a_name_is_there_once() -> None:
    """Whatever its case, as with nodes."""
    (told,) = problems(LEAST + LEAST.replace('"r"', '"R"'))

    assert told == "fleet.toml:9: rollout[1].name: rollout 1 has the name 'R' already"


def test_a_rollout_that_is_not_there_names_close_ones() -> None:
    """Looked up as nodes and recipes are."""
    with pytest.raises(UsageError, match="no rollout 'eu-lama'; did you mean eu-llama"):
        config(LEAST.replace('"r"', '"eu-llama"')).rollout("eu-lama")
