"""agentd's side of the keeper, beside real keepers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from remote_agent.agentd.commands import Commands
from remote_agent.agentd.keeping import KeeperLink
from remote_agent.agentd.paths import StateDir
from remote_agent.agentd.reaper import Child, Reaper
from remote_agent.keeper import ALREADY_RUNS
from remote_agent.keeper.client import KeeperAddress, list_residents
from tests.remote_agent.keeper.keepers import Keep, put


class EndingReaper(Reaper):
    """Whatever it starts has ended already, with that code; ``keep`` starts what is there instead."""

    def __init__(self, code: int, keep: Keep | None = None) -> None:
        super().__init__()
        self._code, self._keep = code, keep

    def spawn(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        output: int,
        channel: int | None = None,
        group: bool = True,
        outlives_agent: bool = False,
    ) -> Child:
        child = Child(0 if self._keep is None else self._keep().pid, lambda pid, number: None, group)
        child.exit.set_result(self._code)
        return child


@pytest.fixture
def directory(state: StateDir) -> Iterator[int]:
    directory = state.open_run()
    yield directory
    os.close(directory)


def link_to(state: StateDir, directory: int, devices: Path, reaper: Reaper) -> KeeperLink:
    return KeeperLink(state, directory, reaper, Commands(), 2, devices)


async def test_a_keeper_that_another_start_is_about_to_give_is_waited_for(
    state: StateDir, directory: int, devices: Path, keep: Keep
) -> None:
    """Two starts at once: the one that came too late to the lock finds the other's keeper."""
    assert await link_to(state, directory, devices, EndingReaper(ALREADY_RUNS, keep)).ensure()


async def test_a_keeper_that_fails_to_start_is_not_waited_for(state: StateDir, directory: int, devices: Path) -> None:
    """The run goes on without one."""
    assert not await link_to(state, directory, devices, EndingReaper(1)).ensure()


async def test_a_refusal_to_stop_is_told_as_one(
    state: StateDir,
    directory: int,
    devices: Path,
    address: KeeperAddress,
    keeper: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The keeper is known as before, and what it holds stays."""
    put(address, "llama@cpu", b"manifest", b"weights")
    link = link_to(state, directory, devices, EndingReaper(1))
    assert await link.ensure()
    await link.stop(force=False)

    assert "the keeper refuses stop: b'residents are held: 1; drop them first" in caplog.text
    assert link.pid == keeper
    assert len(list_residents(address)) == 1
