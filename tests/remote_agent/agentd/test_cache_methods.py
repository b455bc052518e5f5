"""``cache.list`` and ``cache.clear`` over the wire."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from remote_agent.cache_store import in_use
from remote_agent.errors import RefusedError
from remote_agent.protocol.messages import CacheClearParams, CacheClearResult, CacheListParams, CacheListResult
from tests.remote_agent.agentd.agents import Agent
from tests.remote_agent.test_cache_store import keep


def test_an_agent_lists_and_clears_its_own_cache_and_one_that_is_named(
    make_agent: Callable[..., Agent], tmp_path: Path
) -> None:
    """A refusal comes back with its code."""
    agent = make_agent()
    own, named = keep(agent.state.cache, "2.10", ("inductor/a.so",)), keep(tmp_path / "c", "2.11", ("triton/b.cubin",))
    with agent.client() as client:
        mine = client.call("cache.list", CacheListParams(), CacheListResult)
        other = client.call("cache.list", CacheListParams(str(tmp_path / "c")), CacheListResult)
        cleared = client.call("cache.clear", CacheClearParams(own), CacheClearResult)
        with in_use(tmp_path / "c"), pytest.raises(RefusedError) as refused:
            client.call(
                "cache.clear", CacheClearParams(everything=True, directory=str(tmp_path / "c")), CacheClearResult
            )

    assert [entry.digest for entry in (*mine.entries, *other.entries)] == [own, named]
    assert [entry.digest for entry in cleared.cleared] == [own]
    assert refused.value.code == "cache_in_use"
