"""Errors of the console; ``exit_code`` is what the command line ends with.

0 done · 1 a run or gate failed · 2 usage or configuration · 3 a node unreachable · 4 aborted · 130 interrupted

GlowplugError                1
├── UsageError               2  a command line that can't be carried out
├── ConfigError              2  a file that can't be used; ``problems`` names every mistake
├── HistoryError             2  the history can't be opened or written
├── RunFailed                1  a run ended in anything but ``ready``
├── RequestRefused           1  the agent understood and said no; ``code`` is stable
├── UploadFailed             1  a file did not get onto a host
├── DeployFailed             1  a host is not as it must be, or keeps the agent that it has
├── HookFailed               1  a hook that comes with Glowplug did not reach what it is for
│   └── HookRetry           75  and another try may: a rollout runs the hook again
├── Aborted                  4  the operator or a gate stopped it
├── Interrupted            130  Ctrl-C
└── LinkError                3  no conversation with a node; ``final``: a retry can't mend it
    ├── NodeUnreachable         nothing answers, or not in time
    ├── LinkLost                a conversation ended
    ├── AgentMissing            a shell answers, an agent does not
    ├── ProtocolMismatch  final no protocol version in common
    ├── NodeMisconfigured final an identity, a known_hosts file or ssh's own settings can't be used
    ├── AuthenticationFailed final
    ├── PromptDeclined    final a person was asked, and gave no answer or none that is right
    ├── HostKeyUnknown    final never seen; may be accepted by a person
    └── HostKeyChanged    final another key than the known one, or ruled out; is never accepted here
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar


class GlowplugError(Exception):
    """Anything the console raises on purpose; its text is one line for a person (`ConfigError`: several)."""

    exit_code: ClassVar[int] = 1


class UsageError(GlowplugError):
    """A command line that can't be carried out."""

    exit_code = 2


class ConfigError(GlowplugError):
    """A file can't be used; each problem reads ``file:line: path: what``."""

    exit_code = 2

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


class HistoryError(GlowplugError):
    """The history can't be opened or written."""

    exit_code = 2


class RunFailed(GlowplugError):
    """A run ended in anything but ``ready``."""


class RequestRefused(GlowplugError):
    """The agent understood a request and said no; ``code`` is a stable word."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class UploadFailed(GlowplugError):
    """A file did not get onto a host; nothing there has changed."""


class DeployFailed(GlowplugError):
    """A host is not as it must be, or keeps the agent that it has; ``code`` is the host's word for why, or empty."""

    def __init__(self, text: str, code: str = "") -> None:
        super().__init__(text)
        self.code = code


class HookFailed(GlowplugError):
    """A hook that comes with Glowplug did not reach what it is for."""


class HookRetry(HookFailed):
    """Another try may reach it; by this exit code a rollout runs the hook again."""

    exit_code = 75


class Aborted(GlowplugError):
    """The operator or a gate stopped it."""

    exit_code = 4


class Interrupted(GlowplugError):
    """Ctrl-C."""

    exit_code = 130


class LinkError(GlowplugError):
    """There is no conversation with a node; ``final`` says that a retry can't mend it."""

    exit_code = 3
    final: ClassVar[bool] = False


class NodeUnreachable(LinkError):
    """Nothing answers, or not in time."""


class LinkLost(LinkError):
    """A conversation that was under way ended."""


class AgentMissing(LinkError):
    """A shell or program answers on the host, but no agent; the text shows what it said."""


class ProtocolMismatch(LinkError):
    """Console and agent have no protocol version in common."""

    final = True


class NodeMisconfigured(LinkError):
    """An identity file, a known_hosts file or ssh's own settings for this node can't be used."""

    final = True


class AuthenticationFailed(LinkError):
    """The host did not let us in."""

    final = True


class PromptDeclined(LinkError):
    """A person was asked for something, and gave no answer or none that is right."""

    final = True


class HostKeyUnknown(LinkError):
    """No key of this host is known. ``line`` is what `known_hosts.append` would add to ``known_hosts_file``.

    ``fingerprint`` is SHA256's, ``kind`` as ssh names it (``ED25519``); ``hint``: what can be done.
    """

    final = True

    def __init__(
        self, host: str, port: int, fingerprint: str, line: str, known_hosts_file: Path, kind: str = "", hint: str = ""
    ) -> None:
        super().__init__(f"the host key of {host} port {port} is not known: {f'{kind} {fingerprint}'.strip()}{hint}")
        self.host = host
        self.port = port
        self.fingerprint = fingerprint
        self.line = line
        self.known_hosts_file = known_hosts_file
        self.kind = kind


class HostKeyChanged(LinkError):
    """The host shows another key than the known one, or one that may not be accepted. There is nothing to accept.

    ``fingerprint`` is empty where the key was refused before it could be looked at. ``entries``: what
    known_hosts has of the host that speaks against it, ``ED25519 SHA256:… in FILE:LINE``.
    """

    final = True

    def __init__(
        self, host: str, port: int, fingerprint: str, text: str, entries: Sequence[str] = (), kind: str = ""
    ) -> None:
        self.what = f"the host key of {host} port {port} {text}"
        shows = f": it shows {f'{kind} {fingerprint}'.strip()}" if fingerprint else ""
        super().__init__("; ".join((f"{self.what}{shows}", *(f"there is {entry}" for entry in entries))))
        self.host = host
        self.port = port
        self.fingerprint = fingerprint
        self.kind = kind
        self.entries = tuple(entries)
