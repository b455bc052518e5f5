"""What the verbs that talk to the daemon share: the state directory's option, JSON out, errors to exit codes."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

from remote_agent.agentd.paths import StateDir, default_root
from remote_agent.errors import AgentError, RecipeError
from remote_agent.protocol.codec import encode

FAILED, USAGE = 1, 2


def make_parser(verb: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m remote_agent {verb}", description=description)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--state-dir", type=path_argument, help="the agent's state directory (default: this user's)")
    return parser


def state_of(arguments: argparse.Namespace) -> StateDir:
    """Return the state directory that was asked for. Raises: StateDirError"""
    return StateDir(arguments.state_dir or default_root(os.environ))


def print_json(value: object) -> None:
    print(json.dumps(encode(value), indent=2))


def path_argument(text: str) -> Path:
    """Return an option's path; an empty one would mean the current directory and is refused."""
    if not text:
        raise argparse.ArgumentTypeError("an empty path names nothing")
    return Path(text)


def guarded(act: Callable[[], int]) -> int:
    """Return the exit code of ``act``; an error of the agent becomes one line on stderr."""
    try:
        return act()
    except RecipeError as error:
        print(error, file=sys.stderr)
        return USAGE
    except AgentError as error:
        print(f"glowplug-agent: {error}", file=sys.stderr)
        return USAGE if getattr(error, "code", "") == "unsupported" else FAILED
