"""Which nodes a selector names, and how they are chained through hops."""

from __future__ import annotations

from pathlib import Path

import pytest

from console.config import EXAMPLE, Config, parse
from console.config_nodes import Node
from console.errors import UsageError


def test_hops_chain_through_nodes_as_ssh_chains_them() -> None:
    """The first hop's own jumps are followed; a hop in the text form logs in as its node does."""
    text = """
[nodes.edge]
host = "192.0.2.1"
[nodes.inner]
host = "10.0.0.1"
jump = "edge"
[nodes.gpu]
host = "10.0.0.2"
jump = ["inner", "me@[::1]:2222"]
known_hosts = "kh"
"""
    gpu = parse(text, Path("/etc/fleet.toml")).node("gpu")

    assert [(hop.name, hop.port) for hop in gpu.hops] == [("edge", None), ("inner", None), ("::1", 2222)]
    assert (gpu.hops[2].user, gpu.hops[2].known_hosts) == ("me", ("/etc/kh",))


def fleet() -> Config:
    nodes = [Node("eu-1", tags=("eu", "h200")), Node("eu-2", tags=("eu",)), Node("us-1", tags=("us",))]
    return Config(tuple(nodes))


@pytest.mark.parametrize(
    ("selectors", "names"),
    [
        (["all"], ["eu-1", "eu-2", "us-1"]),
        (["us-1", "eu-1", "us-1"], ["eu-1", "us-1"]),
        (["tag:eu"], ["eu-1", "eu-2"]),
        (["tag:h*", "us-?"], ["eu-1", "us-1"]),
        (["*-1"], ["eu-1", "us-1"]),
        ([], []),
    ],
)
def test_selectors_name_nodes_once_in_the_file_s_order(selectors: list[str], names: list[str]) -> None:
    """Names, tags and patterns, in any mixture."""
    assert [node.name for node in fleet().select(selectors)] == names


@pytest.mark.parametrize(
    ("selector", "hint"),
    [("eu-3", "did you mean eu-"), ("tag:ue", "did you mean tag:"), ("EU-1", "eu-1"), ("\x1b[2J", "''")],
)
def test_a_selector_without_a_node_is_an_error_that_names_close_ones(selector: str, hint: str) -> None:
    """A typing mistake never selects nothing in silence."""
    with pytest.raises(UsageError, match="no node matches") as error:
        fleet().select(["all", selector])

    assert hint in str(error.value)
    assert str(error.value).isprintable()


def test_a_missing_recipe_or_node_names_close_ones() -> None:
    """Lookups by exact name are as helpful as selectors."""
    config = parse(EXAMPLE, Path("fleet.toml"))

    assert config.recipe("embed").request.kind == "encode"
    with pytest.raises(UsageError, match="did you mean llama"):
        config.recipe("lama")
    with pytest.raises(UsageError, match="did you mean gpu-"):
        config.node("gpu-9")
