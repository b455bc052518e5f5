"""Agents for tests: each has its own state directory and is gone afterwards, with everything it started."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.remote_agent.agentd.agents import Agent


@pytest.fixture
def make_agent(tmp_path: Path) -> Iterator[Callable[..., Agent]]:
    """Return a function that starts an agent with the given options; by default it makes nothing ready beforehand."""
    made: list[Agent] = []

    def make(**options: Any) -> Agent:
        folder = tmp_path / f"agent{len(made)}"
        folder.mkdir()
        agent = Agent(folder, **{"heartbeat_s": 0.1, "idle_s": 3600.0, **options})
        made.append(agent)
        return agent.start()

    yield make
    for agent in made:
        agent.close()


@pytest.fixture
def agent(make_agent: Callable[..., Agent]) -> Agent:
    """Return a running agent."""
    return make_agent()
