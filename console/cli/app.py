"""Opens the console on the configured fleet; the one place of the command line that imports Textual."""

from __future__ import annotations

from console.cli.common import Context, ended_by_signals
from console.fleet import Fleet


def open_console(context: Context, *, read_only: bool, ascii: bool, theme: str | None) -> int:
    """Show the fleet until the operator leaves; return the exit code. Raises: ConfigError."""
    config = context.load_config()
    context.start_log()
    with ended_by_signals():
        return show(context, context.fleet(config), config.path.stem, read_only=read_only, ascii=ascii, theme=theme)


def show(
    context: Context,
    fleet: Fleet,
    title: str,
    *,
    read_only: bool = False,
    ascii: bool = False,
    theme: str | None = None,
    runs_outlive: bool = True,
) -> int:
    """Show any fleet; ``runs_outlive`` is False where its hosts end with the console."""
    from console.app import run_app

    return run_app(
        fleet,
        title=title,
        read_only=read_only,
        ascii=ascii,
        theme=theme,
        preferences=context.locations.state_directory / "preferences.json",
        runs_outlive=runs_outlive,
        no_color=bool(context.environ.get("NO_COLOR")),
    )
