"""``install``: makes the file that it runs from the current version, and hands over from the agent that is at work.

An agent with a run or a process that holds a model is never ended for it: that is refused, or its end waited for.
The keeper lives on, so residents do. While the link moves, this process holds the agent's lock, so that nobody
starts the old version again in between.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import remote_agent
from remote_agent.agentd.daemon import holder, take_lock, write_pid
from remote_agent.agentd.paths import StateDir
from remote_agent.client import connect_running, open_client
from remote_agent.errors import (
    AgentError,
    ConnectionLostError,
    LaunchError,
    RefusedError,
    SilentAgentError,
    VersionError,
)
from remote_agent.protocol.codec import encode
from remote_agent.protocol.messages import INSTALL_WAIT_MOST_S, Empty, Installed, InstallTold, ShutdownParams
from remote_agent.verbs._common import FAILED, guarded, make_parser, path_argument, print_json, state_of
from remote_agent.versions import UPLOAD_PREFIX, Versions

LINK = Path("~/.local/share/glowplug/glowplug-agent.pyz")
"""Where consoles look for an agent that no configuration names."""

END_S = 30.0
"""How long an agent that agreed to end may take for it."""
START_S = 60.0
POLL_S = 0.05
TELL_S = 2.0

Tell = Callable[[str], None]


def main(argv: list[str]) -> int:
    """Return 0 once this version is current and its agent runs; 1 where the old one stays, whole and at work."""
    parser = make_parser("install", "Make this file the agent that consoles start, in place of the one at work.")
    parser.add_argument("--link", type=path_argument, default=LINK, help=f"where consoles look (default: {LINK})")
    parser.add_argument(
        "--wait", type=_seconds, default=0.0, metavar="SECONDS", help="for the old agent's work to end; else refused"
    )
    parser.add_argument("--tell", metavar="TOKEN", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    return _reporting(arguments) if arguments.tell else guarded(lambda: _for_a_person(arguments))


def _for_a_person(arguments: argparse.Namespace) -> int:
    done = install(arguments, lambda text: print(text, file=sys.stderr, flush=True), lambda: False)
    if arguments.json:
        print_json(done)
    else:
        print(f"agent {done.version} ({done.digest}) is current: {done.path}")
    return 0


def _reporting(arguments: argparse.Namespace) -> int:
    """Speak to a console: lines that begin with its token, one JSON object each. Its end ends a wait."""

    def say(told: InstallTold) -> None:
        try:
            print(f"\n{arguments.tell} {json.dumps(encode(told))}", flush=True)
        except OSError:
            pass  # the console has gone: what was begun is brought to its end

    try:
        done = install(arguments, lambda text: say(InstallTold(step=text)), _input_has_ended)
    except (AgentError, OSError) as error:
        say(InstallTold(error=_one_line(error), code=getattr(error, "code", "")))
        return FAILED
    say(InstallTold(done=done))
    return 0


def install(arguments: argparse.Namespace, tell: Tell, is_called_off: Callable[[], bool]) -> Installed:
    """Bring this version in and return what is there now. Raises: AgentError, OSError; the old version stays then."""
    source = Path(remote_agent.__path__[0]).parent
    if not source.is_file():
        raise VersionError(f"install is for the single file; this agent runs from the folder {source}")
    versions, state = Versions(arguments.link.expanduser()), state_of(arguments)
    try:
        with versions.alone():
            state.prepare()
            stored = versions.store(source)
            before, was_running = versions.current(), False
            if before != stored or not _is_at_work(state, stored):
                give_up = time.monotonic() + arguments.wait
                with _no_agent(state, give_up, tell, is_called_off) as was_running:
                    before = versions.switch(stored)
            pid = _start(versions, state, before, was_running)
            removed = versions.prune()
    finally:
        if source.name.startswith(UPLOAD_PREFIX):
            source.unlink(missing_ok=True)  # what this process runs is imported by now
    digest, former = stored.parent.name, before.parent.name if before is not None else None
    return Installed(remote_agent.__version__, digest, str(stored), former, pid, was_running, tuple(removed))


@contextlib.contextmanager
def _no_agent(state: StateDir, give_up: float, tell: Tell, is_called_off: Callable[[], bool]) -> Iterator[bool]:
    """Hold the agent's lock, so that none runs or starts; gives whether one had to end for it.

    Raises: RefusedError with what the agent still has to do at ``give_up``; AgentError
    """
    was_running, told_at = False, 0.0
    while (lock := take_lock(state)) is None:
        work = _ask_to_end(state)
        if work is None:
            was_running = True
            _wait_for_end(state)
            continue
        if is_called_off():
            raise RefusedError("called_off", "whoever waited for the agent's work to end has gone")
        if time.monotonic() >= give_up:
            raise RefusedError("busy", work)
        if time.monotonic() - told_at >= TELL_S:
            tell(f"waiting: {work}")
            told_at = time.monotonic()
        time.sleep(POLL_S)
    try:
        write_pid(lock)
        yield was_running
    finally:
        os.close(lock)


def _ask_to_end(state: StateDir) -> str | None:
    """Return None once the agent has agreed to end, or what it still has to do. Raises: AgentError if it hangs"""
    try:
        with open_client(state, "install", connect_running) as client:
            client.call("shutdown", ShutdownParams(), Empty)
    except RefusedError as refusal:
        if refusal.code in ("busy", "stopping"):
            return str(refusal)
        raise
    except SilentAgentError as error:
        raise SilentAgentError(f"{error}; the verb stop --force ends it there") from error
    except (ConnectionLostError, LaunchError):
        pass  # it ended before its answer was read, or before it was asked
    return None


def _wait_for_end(state: StateDir) -> None:
    """Return once no agent holds the lock. Raises: VersionError if one that agreed to end does not"""
    give_up = time.monotonic() + END_S
    while (lock := take_lock(state)) is None:
        if time.monotonic() > give_up:
            raise VersionError(f"the agent of {state.root} agreed to end and has not within {END_S:g} s")
        time.sleep(POLL_S)
    os.close(lock)


def _start(versions: Versions, state: StateDir, before: Path | None, was_running: bool) -> int | None:
    """Start the agent as a console would, by the link, and return its pid.

    Raises: VersionError if it does not start; the version ``before``, if there was one, is current again then, and runs
    again if one ran.
    """
    problem = _reach(versions.link, state)
    if problem is None:
        return holder(state)
    new = versions.current()
    if before is None or before == new:
        raise VersionError(f"{new} is current, but its agent does not start: {problem}")
    versions.switch_back(before)
    again = _reach(versions.link, state) if was_running else None
    rest = f", and that does not start either: {again}" if again is not None else ""
    raise VersionError(f"the new agent does not start: {problem}; {before.parent.name} is current again{rest}")


def _reach(link: Path, state: StateDir) -> str | None:
    """Have a bridge reach the agent, which starts it; None, or one line on why that failed."""
    command = [sys.executable, str(link), "bridge", "--mark", "install-reaches-it", "--state-dir", str(state.root)]
    try:
        reached = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=START_S
        )
    except subprocess.TimeoutExpired:
        return f"nothing within {START_S:g} s"
    return None if reached.returncode == 0 else " / ".join(reached.stdout.decode("utf-8", "replace").split("\n")[-4:])


def _is_at_work(state: StateDir, stored: Path) -> bool:
    """Return whether the agent that runs was started from this very file."""
    pid = holder(state)
    try:
        return pid is not None and os.fsencode(stored) in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


def _input_has_ended() -> bool:
    """Whether the console that started this has closed its side; it sends nothing."""
    return bool(select.select([0], [], [], 0)[0]) and not os.read(0, 4096)


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    return " / ".join(line for line in str(error).splitlines() if line.strip())


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds <= INSTALL_WAIT_MOST_S:
        raise argparse.ArgumentTypeError(f"{text} is not within 0..{INSTALL_WAIT_MOST_S:g} seconds")
    return seconds
