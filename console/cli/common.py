"""What verbs share: configuration, a fleet around their work, progress on stderr, documents on stdout."""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import json
import logging
import logging.handlers
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from console.clean import clean
from console.cli.streams import tell
from console.errors import Aborted, Interrupted
from console.heap import settled_heap
from console.locations import Locations
from console.places import PARALLEL_MOST

if TYPE_CHECKING:
    from console.config import Config
    from console.fleet import Fleet
    from console.prompts import PromptQueue
    from remote_agent.protocol.messages import Actor

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

LOG_BYTES, LOGS_KEPT = 4 << 20, 2
_handlers: list[logging.Handler] = []


@dataclass(frozen=True)
class Context:
    """Where this invocation's files are, and its environment."""

    locations: Locations
    environ: Mapping[str, str]

    def load_config(self) -> Config:
        """Return the configuration. Raises: ConfigError."""
        from console.config import load

        return load(self.locations.config_file)

    def fleet(
        self,
        config: Config,
        names: Sequence[str] | None = None,
        parallel: int | None = None,
        prompts: PromptQueue | None = None,
    ) -> Fleet:
        """Return a fleet over real links, not started yet; without ``prompts`` no login asks anybody."""
        from console.fleet import Fleet
        from console.links import real_links
        from console.transports.gate import Gate

        return Fleet(
            config,
            self.locations.history_file,
            nodes=names,
            parallel=parallel or config.defaults.parallel,
            actor=current_actor(),
            links=real_links(Gate.create(self.locations, self.environ), prompts),
        )

    @property
    def program_environ(self) -> dict[str, str]:
        """The environment of programs that the operator names: a `glowplug` of theirs is at the same places."""
        return {**self.environ, **self.locations.environ}

    def start_log(self) -> None:
        """Write this process's log to its file; without one where it can't be written."""
        start_log(self.locations)


def start_log(places: Locations) -> None:
    """Send everything from INFO to the log file; without one where it can't be written."""
    stop_log()
    try:
        places.log_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handler = logging.handlers.RotatingFileHandler(places.log_file, maxBytes=LOG_BYTES, backupCount=LOGS_KEPT)
    except OSError:
        return
    handler.setFormatter(logging.Formatter("%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"))
    _handlers.append(handler)
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    logging.getLogger("asyncssh").setLevel(logging.WARNING)


def stop_log() -> None:
    """Close the log file."""
    while _handlers:
        handler = _handlers.pop()
        logging.getLogger().removeHandler(handler)
        handler.close()


def is_logging() -> bool:
    return bool(_handlers)


def current_actor() -> Actor:
    """Return who is at work here; a missing passwd entry or name is no obstacle."""
    from remote_agent.protocol.messages import Actor

    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = f"uid {os.getuid()}"
    return Actor(clean(user, 80) or "unknown", clean(socket.gethostname(), 80) or "unknown")


class FilePath(click.Path):
    """A path on the command line; an empty one, which would be the current directory, is a mistake."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not value:
            self.fail("it is empty", param, ctx)
        return super().convert(value, param, ctx)


json_option = click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout, nothing else there.")
parallel_option = click.option(
    "--parallel", type=click.IntRange(1, PARALLEL_MOST), help="Runs at one time; the configuration's by default."
)
yes_option = click.option("--yes", "-y", is_flag=True, help="Do not ask.")


def emit(document: object) -> None:
    """Write one JSON document to stdout."""
    click.echo(json.dumps(document, indent=2, ensure_ascii=False, default=str))


def say(text: str) -> None:
    """Write one line of progress to stderr, if it can be written to."""
    tell(clean(text, 2000))


def confirm(question: str, yes: bool) -> None:
    """Ask on a terminal; where nobody can be asked the command line itself is the answer.

    Raises: Aborted.
    """
    if yes or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise Aborted("nothing was done")


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into an orderly end of what is inside. Raises: Interrupted."""

    def end(number: int, frame: object) -> None:
        raise Interrupted(f"ended by {signal.Signals(number).name}")

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_async(work: Coroutine[Any, Any, T], explain: Callable[[], str] = lambda: "interrupted") -> T:
    """Run ``work``; at the first Ctrl-C or SIGTERM it is ended in order, at the second at once.

    Raises: Interrupted with what ``explain`` says then.
    """
    interrupted = False

    async def guarded() -> T:
        nonlocal interrupted
        task = asyncio.ensure_future(work)
        loop = asyncio.get_running_loop()

        def interrupt(number: signal.Signals) -> None:
            nonlocal interrupted
            if interrupted:
                os._exit(128 + number)
            interrupted = True
            task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, interrupt, number)
        return await task

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        with settled_heap():
            return asyncio.run(guarded())
    except asyncio.CancelledError:
        if not interrupted:
            raise
        raise Interrupted(explain()) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
