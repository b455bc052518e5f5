"""Calls a recipe's entry point with the model that this process has attached, and says what came of it.

The function has the main thread, as servers want it. It returns once it was told to stop; before, that is a failure.
"""

from __future__ import annotations

import importlib
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from remote_agent.pipeline.failures import brief, fail
from remote_agent.pipeline.making import Held
from remote_agent.protocol.messages import Serve


class ServeContext:
    """What an entry point is given beside model and tokenizer.

    ``host`` and ``port``: where to listen. ``stop`` is set when it is to return. ``recipe`` and ``device``: names.
    """

    def __init__(self, serve: Serve, recipe: str, device: str) -> None:
        self.host, self.port, self.recipe, self.device = serve.host, serve.port, recipe, device
        self.stop = threading.Event()
        self._lock = threading.Lock()
        self._calls: list[Callable[[], object]] = []

    def on_stop(self, call: Callable[[], object]) -> None:
        """Have ``call`` called, in a thread of its own, when the server is to stop; at once if that was so before."""
        with self._lock:
            self._calls.append(call)
            is_late = self.stop.is_set()
        if is_late:
            self._tell()

    def tell_to_stop(self) -> None:
        """Set ``stop`` and make the calls."""
        with self._lock:
            self.stop.set()
        self._tell()

    def _tell(self) -> None:
        with self._lock:
            calls, self._calls = self._calls, []
        for call in calls:
            try:
                call()
            except Exception:
                traceback.print_exc(file=sys.stderr)


def refuse_used_port(serve: Serve) -> None:
    """Raise StageError if nobody can listen there now."""
    family = socket.AF_INET6 if ":" in serve.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what closed a moment ago is no obstacle
        try:
            trial.bind((serve.host, serve.port))
            trial.listen(1)
        except OSError as error:
            raise fail("port_unusable", f"nothing can listen on {serve.address}: {error.strerror or error}") from error


def load_entry(serve: Serve) -> Callable[..., object]:
    """Return the function that a recipe names. Raises: StageError saying what can't be imported"""
    module_name, _, path = serve.entry.partition(":")
    if serve.path is not None:
        folder = Path(serve.path).expanduser()
        if not folder.is_dir():
            raise fail("entry_unusable", f"serve.path {folder} is no folder")
        sys.path.insert(0, str(folder))
    try:
        found: Any = importlib.import_module(module_name)
        for name in path.split("."):
            found = getattr(found, name)
    except BaseException as error:  # the user's own code may raise anything, SystemExit too
        if not isinstance(error, ModuleNotFoundError):
            traceback.print_exc(file=sys.stderr)
        raise fail("entry_unusable", f"serve.entry {serve.entry} can't be imported: {brief(error)}") from error
    if not callable(found):
        raise fail("entry_unusable", f"serve.entry {serve.entry} is {type(found).__name__}, not a function")
    function: Callable[..., object] = found
    return function


def call_entry(function: Callable[..., object], entry: str, held: Held, context: ServeContext) -> None:
    """Call the entry point until it is told to stop. Raises: StageError if it raised, or returned before that"""
    begun = time.monotonic()
    try:
        function(held.warm.model, held.warm.tokenizer, context)
    except BaseException as error:
        traceback.print_exc(file=sys.stderr)
        if context.stop.is_set():
            return
        after = time.monotonic() - begun
        raise fail("entry_failed", f"{entry} raised after {after:.1f} s: {brief(error)}") from error
    if not context.stop.is_set():
        after = time.monotonic() - begun
        raise fail("entry_returned", f"{entry} returned after {after:.1f} s, and nothing had told it to stop")
