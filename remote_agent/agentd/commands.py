"""How each child process is started."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from remote_agent.agentd.launch import agent_command
from remote_agent.agentd.reaper import CHANNEL_FD

BARE = {"preflight-child", "cacher"}
"""Verbs that need the standard library alone: without ``site`` they start in a fraction of the time."""


class Commands:
    """The agent's own verbs, on its own Python or on a run's. Tests replace `argv`."""

    def argv(self, verb: str, python: tuple[str, ...] = ()) -> tuple[str, ...]:
        """Return the command for ``verb``; an empty ``python`` is the one that the agent runs on."""
        arguments, _ = agent_command()
        options = ("-S",) if verb in BARE and not python else ()
        return (*(python or (sys.executable,)), *options, *arguments, verb)

    def talking(self, verb: str, python: tuple[str, ...] = ()) -> tuple[str, ...]:
        """Return the command for a child that finds its socket to the agent as an inherited descriptor."""
        return (*self.argv(verb, _located(python)), "--fd", str(CHANNEL_FD))

    def environment(self, extra: Mapping[str, str]) -> dict[str, str]:
        _, needed = agent_command()
        return {**os.environ, **needed, **extra}


def _located(python: tuple[str, ...]) -> tuple[str, ...]:
    """Return ``python`` with its program as an absolute path, looked up once; as it is where there is none.

    A leading ``~/`` is the user's home, a bare name is looked up in PATH: as the shell does that starts the bridge.
    """
    if not python:
        return python
    if python[0] not in _found:
        program = (
            str(Path(python[0]).expanduser()) if python[0].startswith("~/") and "HOME" in os.environ else python[0]
        )
        found = shutil.which(program)
        if found is None:
            return (program, *python[1:])
        _found[python[0]] = str(Path(found).absolute())  # a link stays one: it is how an environment is told apart
    return (_found[python[0]], *python[1:])


_found: dict[str, str] = {}
