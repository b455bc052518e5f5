"""Opens the console on the configured fleet; the one place of the command line that imports Textual."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable

from console.cli.common import Context, current_actor, ended_by_signals
from console.errors import UsageError
from console.fleet import Fleet
from console.heap import settled_heap
from console.prompts import PromptQueue


def open_console(context: Context, *, read_only: bool, ascii: bool, theme: str | None) -> int:
    """Show the fleet until the operator leaves; return the exit code. Raises: ConfigError, UsageError."""
    config = context.load_config()
    require_terminal("verbs such as `glowplug status` do not")
    context.start_log()
    prompts = PromptQueue()
    fleet = context.fleet(config, prompts=prompts)
    with ended_by_signals():
        return show(context, fleet, config.path.stem, read_only=read_only, ascii=ascii, theme=theme, prompts=prompts)


def require_terminal(instead: str) -> None:
    """See that somebody can look and type; the screen is drawn on stderr. Raises: UsageError, ``instead`` its end."""
    if not all(stream is not None and stream.isatty() for stream in (sys.__stdin__, sys.__stderr__)):
        raise UsageError(f"the console needs a terminal; {instead}")


def show(
    context: Context,
    fleet: Fleet,
    title: str,
    *,
    read_only: bool = False,
    ascii: bool = False,
    theme: str | None = None,
    runs_outlive: bool = True,
    watch: Callable[[], Awaitable[None]] | None = None,
    prompts: PromptQueue | None = None,
) -> int:
    """Show any fleet; ``runs_outlive`` is False where its hosts end with the console; the rest as for `run_app`."""
    from console.app import run_app
    from console.rollout.carrying import carrier_of

    with settled_heap():
        return run_app(
            fleet,
            carrier_of(fleet, context.locations.history_file, current_actor(), context.program_environ),
            title=title,
            read_only=read_only,
            ascii=ascii,
            theme=theme,
            preferences=context.locations.state_directory / "preferences.json",
            runs_outlive=runs_outlive,
            watch=watch,
            prompts=prompts,
            no_color=bool(context.environ.get("NO_COLOR")),
        )
