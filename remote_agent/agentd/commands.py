"""How each child process is started."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from remote_agent.agentd.launch import agent_command
from remote_agent.agentd.reaper import CHANNEL_FD

BARE = {"preflight-child"}
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
        return (*self.argv(verb, _at_home(python)), "--fd", str(CHANNEL_FD))

    def environment(self, extra: Mapping[str, str]) -> dict[str, str]:
        _, needed = agent_command()
        return {**os.environ, **needed, **extra}


def _at_home(python: tuple[str, ...]) -> tuple[str, ...]:
    """Return ``python`` with a leading ``~/`` read as the shell that starts the bridge does: the user's home."""
    if not python or not python[0].startswith("~/") or "HOME" not in os.environ:
        return python
    return (str(Path(python[0]).expanduser()), *python[1:])
