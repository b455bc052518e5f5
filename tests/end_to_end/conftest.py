"""One embedded node for all tests of this package that need one: torch is imported there once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from console.demo import DemoSettings, EmbeddedFleet
from tests.end_to_end.consoles import write_config


@pytest.fixture(scope="package")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedFleet]:
    """A real node behind a real SSH server, with the demo's checkpoint."""
    directory = tmp_path_factory.mktemp("node") / "demo"
    with EmbeddedFleet(DemoSettings(nodes=1, directory=directory, device="cpu")) as demo:
        yield demo
    assert demo.problems == ()


@pytest.fixture(scope="package")
def config(node: EmbeddedFleet) -> Path:
    """The node's fleet.toml."""
    return write_config(node)
