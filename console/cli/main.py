"""The command group, and what becomes of every error: one line on stderr and an exit code."""

from __future__ import annotations

import importlib
import logging
import os
from pathlib import Path

import click

from console import __version__
from console.cli.common import Context, FilePath, is_logging, start_log, stop_log
from console.cli.streams import OutputError, tell
from console.errors import GlowplugError, Interrupted
from console.locations import locations

VERBS = {
    "demo": "console.cli.demo",
    "deploy": "console.cli.deploy",
    "warm": "console.cli.warm",
    "watch": "console.cli.watch",
    "cancel": "console.cli.cancel",
    "release": "console.cli.release",
    "standby": "console.cli.standby",
    "park": "console.cli.park",
    "unpark": "console.cli.unpark",
    "serve": "console.cli.serve",
    "verify": "console.cli.verify",
    "probe": "console.cli.probe",
    "status": "console.cli.status",
    "cache": "console.cli.cache",
    "rollout": "console.cli.rollout",
    "hook": "console.cli.hook",
    "history": "console.cli.history",
    "show": "console.cli.show",
    "config": "console.cli.config",
}
"""Verb to module; each has ``command``, and its first line of help is in `HELP`."""

HELP = {
    "demo": "Try it: three nodes on this machine, behind a real SSH server.",
    "deploy": "Bring the agent to nodes, or upgrade it there.",
    "warm": "Warm a recipe on nodes.",
    "watch": "Keep a recipe warm on nodes, and say when one fell.",
    "cancel": "End a run.",
    "release": "Let go of warm models.",
    "standby": "Start processes that wait for a model's weights, or end them.",
    "park": "Take a standby off its GPU, into the host's memory.",
    "unpark": "Put a parked standby back on its GPU.",
    "serve": "Stop what serves warm models.",
    "verify": "Send real requests to what is ready.",
    "probe": "Ask nodes what they are.",
    "status": "What runs and what is warm on nodes.",
    "cache": "What compile caches keep on a node, and clear them.",
    "rollout": "Bring a recipe to many nodes batch by batch.",
    "hook": "Move a node's traffic, as a hook of a rollout.",
    "history": "Runs, newest first.",
    "show": "One run, stage by stage, beside the run before it.",
    "config": "Check or find the configuration.",
}

_SILENT = logging.NullHandler()
"""Keeps what nobody asked to log from stderr."""

log = logging.getLogger(__name__)


class _Verbs(click.Group):
    """Imports a verb's module only when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        command: click.Command = importlib.import_module(VERBS[cmd_name]).command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs (glowplug VERB --help says more)"):
            formatter.write_dl(list(HELP.items()))


@click.command(cls=_Verbs, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="glowplug", message="%(prog)s %(version)s")
@click.option("--config", type=FilePath(), help="The fleet.toml to use (GLOWPLUG_CONFIG).")
@click.option("--history", type=FilePath(), help="The history to use (GLOWPLUG_HISTORY).")
@click.option("--log", type=FilePath(), help="The log file to write (GLOWPLUG_LOG).")
@click.option("--read-only", is_flag=True, help="Open the console so that it changes nothing on any host.")
@click.option("--ascii", is_flag=True, help="Draw the console with ASCII alone.")
@click.option("--theme", help="The console's theme, for this time.")
@click.pass_context
def glowplug(
    context: click.Context,
    config: Path | None,
    history: Path | None,
    log: Path | None,
    read_only: bool,
    ascii: bool,
    theme: str | None,
) -> None:
    """Warm models across a GPU fleet and see where every second of a cold start goes.

    Without a verb, opens the console on the configured fleet.

    Exit codes: 0 done, 1 a run or gate failed, 2 usage or configuration, 3 a node
    unreachable, 4 aborted, 130 interrupted.
    """
    context.obj = Context(locations(os.environ, config, history, log), os.environ)
    if context.invoked_subcommand is None:
        from console.cli.app import open_console

        context.exit(open_console(context.obj, read_only=read_only, ascii=ascii, theme=theme))


def execute(argv: list[str]) -> int:
    """Run a command line; every error becomes one line and an exit code, its traceback goes to the log.

    Raises: BrokenPipeError, OutputError, for stdout alone.
    """
    logging.getLogger().addHandler(_SILENT)
    try:
        return _execute(argv)
    except (BrokenPipeError, OutputError):
        raise
    except KeyboardInterrupt:
        return _fail(Interrupted("interrupted"))
    except GlowplugError as error:
        return _fail(error)
    except Exception as error:
        return _fail_unexpectedly(error)
    finally:
        stop_log()


def _execute(argv: list[str]) -> int:
    try:
        result = glowplug.main(args=argv, prog_name="glowplug", standalone_mode=False)
    except click.exceptions.Exit as leave:
        return leave.exit_code
    except click.UsageError as error:
        return _misused(error)
    except click.ClickException as error:
        _say(error.format_message())
        return 2
    except click.Abort:
        raise KeyboardInterrupt from None
    except SystemExit:  # what click makes of a closed pipe
        raise BrokenPipeError from None
    return result if isinstance(result, int) else 0


def _misused(error: click.UsageError) -> int:
    if type(error).__name__ == "NoArgsIsHelpError":
        tell(error.format_message())
    else:
        place = error.ctx.command_path if error.ctx else "glowplug"
        _say(f"{' '.join(error.format_message().split())} ({place} --help says more)")
    return 2


def _fail_unexpectedly(error: Exception) -> int:
    """An error of our own: its traceback is for the log, where it can be found."""
    try:
        places = locations(os.environ)
    except GlowplugError:
        where = ""
    else:
        where = f" (the log has more: {places.log_file})"
        if not is_logging():
            start_log(places)
    log.error("unexpected", exc_info=error)
    _say(f"internal error: {type(error).__name__}: {error}{where}")
    return 1


def _fail(error: GlowplugError) -> int:
    log.info("failed", exc_info=error)
    for line in str(error).splitlines() or [type(error).__name__]:
        _say(line)
    return error.exit_code


def _say(text: str) -> None:
    from console.clean import clean

    tell(f"glowplug: {clean(text, 2000)}")
