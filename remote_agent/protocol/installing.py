"""What an installation of the agent on its host tells a console."""

from __future__ import annotations

from remote_agent.protocol.records import dataclass

INSTALL_WAIT_MOST_S = 86400.0
"""What an installation may wait for the runs of the agent before it."""


@dataclass(frozen=True)
class Installed:
    """What an installation of the agent on a host came to.

    ``digest``: of the version that is current now; ``before``: of the one that was. ``pid``: of the agent now.
    ``was_running``: another version's agent was at work and has ended. ``removed``: digests of old versions.
    """

    version: str
    digest: str
    path: str
    before: str | None
    pid: int | None
    was_running: bool
    removed: tuple[str, ...]


@dataclass(frozen=True)
class InstallTold:
    """One line of an installation that a console follows; the last one has ``done`` or ``error``.

    ``step``: what goes on, for people; ``ready`` is the host's Python before anything of the agent's file runs.
    ``code``: a refusal's stable word.
    """

    step: str | None = None
    error: str | None = None
    code: str = ""
    done: Installed | None = None
