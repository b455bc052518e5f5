"""``glowplug config``"""

from __future__ import annotations

import click

from console.cli.common import Context, emit, json_option
from console.errors import ConfigError
from console.format import counted


@click.group("config")
def command() -> None:
    """Check, find or begin the configuration."""


@command.command("check")
@json_option
@click.pass_obj
def check(context: Context, as_json: bool) -> int:
    """Read fleet.toml and name every mistake, with file and line. Exit code 2 if there is one."""
    path = str(context.locations.config_file)
    try:
        config = context.load_config()
    except ConfigError as error:
        if not as_json:
            raise
        emit({"path": path, "problems": list(error.problems), "nodes": [], "recipes": [], "rollouts": []})
        return error.exit_code
    if as_json:
        names = [node.name for node in config.nodes]
        rollouts = [rollout.name for rollout in config.rollouts]
        emit({"path": path, "problems": [], "nodes": names, "recipes": list(config.recipes), "rollouts": rollouts})
    else:
        counts = [counted(len(config.nodes), "node"), counted(len(config.recipes), "recipe")]
        if config.rollouts:
            counts.append(counted(len(config.rollouts), "rollout"))
        click.echo(f"{path}: {', '.join(counts)}, no mistake")
    return 0


@command.command("path")
@json_option
@click.pass_obj
def path(context: Context, as_json: bool) -> int:
    """Print where fleet.toml is; with --json, where every file is."""
    places = context.locations
    if as_json:
        emit(
            {
                "config": str(places.config_file),
                "history": str(places.history_file),
                "log": str(places.log_file),
                "known_hosts": str(places.known_hosts_file),
            }
        )
    else:
        click.echo(places.config_file)
    return 0


@command.command("example")
@json_option
def example(as_json: bool) -> int:
    """Print a fleet.toml to begin from, every key explained."""
    from console.config import EXAMPLE

    if as_json:
        emit({"example": EXAMPLE})
    else:
        click.echo(EXAMPLE, nl=False)
    return 0
