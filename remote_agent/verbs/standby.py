"""``standby``: starts a process that waits for a model's weights, or ends those that wait or hold."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from remote_agent.client import connect_running, open_client
from remote_agent.protocol.messages import StandbyStopParams, StandbyStopResult
from remote_agent.recipe import read_recipe
from remote_agent.verbs._common import guarded, make_parser, print_json, state_of
from remote_agent.verbs.run import add_recipe, start

VERBS = ("start", "stop")


def main(argv: list[str]) -> int:
    """Return 0 when it waits or has ended, 1 when it does not, 2 for a usage error, 130 if interrupted."""
    if argv[:1] == ["start"]:
        parser = make_parser("standby start", "Make all of a model but its weights, and wait for a run to bring them.")
        add_recipe(parser)
        parser.set_defaults(release=False)
        return start(parser.parse_args(argv[1:]), "standby.start")
    if argv[:1] == ["stop"]:
        parser = make_parser("standby stop", "End the standbys of a recipe; what is resident of it stays.")
        parser.add_argument("recipe", help="the recipe's name, or its file as start takes it")
        arguments = parser.parse_args(argv[1:])
        return guarded(lambda: _stop(arguments))
    parser = argparse.ArgumentParser(prog="python -m remote_agent standby", description=__doc__)
    parser.add_argument("verb", choices=VERBS, help="VERB --help says more")
    parser.parse_args(argv)
    return 2


def _stop(arguments: argparse.Namespace) -> int:
    name = _name_of(arguments.recipe)
    with open_client(state_of(arguments), "standby", connect_running) as client:
        result = client.call("standby.stop", StandbyStopParams(name), StandbyStopResult)
    if arguments.json:
        print_json(result)
    else:
        for one in result.stopped:
            print(f"stopped {one.recipe} on {one.device}, {one.tier.value} ({one.bytes / 1e9:.2f} GB)")
    return 0


def _name_of(recipe: str) -> str:
    """Return the name that is meant: that of a recipe's file, or the word itself. Raises: RecipeError"""
    path = Path(recipe)
    is_file = path.suffix in (".toml", ".json") and path.is_file()
    return read_recipe(path).name if is_file or os.sep in recipe else recipe
