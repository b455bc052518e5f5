"""``python -m remote_agent VERB``: the agent's command line. Imports a verb's module only when it is asked for.

A verb for people never ends in a traceback: what goes wrong is one line on stderr. With
GLOWPLUG_DEBUG=1 the traceback comes too. The agent's own processes keep theirs: it is for their log.
"""

from __future__ import annotations

import errno
import importlib
import io
import os
import sys

from remote_agent import __version__

TYPE_CHECKING = False  # typing's own takes 20 ms to import, in which Control-C would find no handler
if TYPE_CHECKING:
    from typing import TextIO

    from _typeshed import ReadableBuffer

VERBS = {
    "bridge": ("remote_agent.bridge", "stdio to the agent's socket; starts the agent when it is not running"),
    "probe": ("remote_agent.verbs.probe", "what this host is: GPUs, driver, memory"),
    "preflight": ("remote_agent.verbs.preflight", "check a checkpoint without touching a GPU"),
    "load": ("remote_agent.verbs.load", "load a checkpoint onto a device and time it"),
    "run": ("remote_agent.verbs.run", "warm a recipe through every stage, without a console"),
    "status": ("remote_agent.verbs.status", "what runs and what is held here"),
    "standby": ("remote_agent.verbs.standby", "start a process that waits for a model's weights, or end it"),
    "release": ("remote_agent.verbs.release", "let go of warm models, or of the driver"),
    "cache": ("remote_agent.verbs.cache", "what compile caches keep, and clear them"),
    "install": (
        "remote_agent.verbs.install",
        "make this file the agent that consoles start, in place of the one at work",
    ),
    "stop": ("remote_agent.verbs.stop", "end the agent"),
}
"""Verbs for people: module (with ``main(argv) -> int``) and one line of help."""

CHILDREN = {
    "agentd": "remote_agent.agentd.server",
    "keeper": "remote_agent.keeper.process",
    "sampler": "remote_agent.sampler",
    "zygote": "remote_agent.zygote",
    "worker": "remote_agent.worker",
    "cacher": "remote_agent.pagecache.process",
    "preflight-child": "remote_agent.pipeline.preflight",
    "park-child": "remote_agent.park_child",
}
"""Processes the agent starts itself."""


FAILED, USAGE, INTERRUPTED = 1, 2, 130


class _Output(io.FileIO):
    """Stdout that remembers the first write that failed, and drops what comes after it."""

    failure: OSError | None = None

    def write(self, data: ReadableBuffer, /) -> int:
        if self.failure is not None:
            return memoryview(data).nbytes
        try:
            return super().write(data)
        except OSError as error:
            self.failure = error
            raise


def main(argv: list[str] | None = None) -> int:
    """Run one verb and return its exit code: 2 for a usage error, 130 when interrupted."""
    arguments = sys.argv[1:] if argv is None else argv
    if arguments[:1] and arguments[0] in CHILDREN:
        return _dispatch(arguments)
    if not _open_standard_streams():
        _say("stdout: closed")
        return FAILED
    output = _Output(1, "w", closefd=False)
    if sys.stdout is sys.__stdout__:
        sys.stdout = _text(output)
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt as interrupt:
        code = int(getattr(interrupt, "exit_code", INTERRUPTED))
    except SystemExit as request:
        code = request.code if isinstance(request.code, int) else FAILED if request.code else 0
    except Exception as error:
        if os.environ.get("GLOWPLUG_DEBUG") == "1":
            sys.excepthook(type(error), error, error.__traceback__)
        if output.failure is not None:
            code = 0
        else:
            code = FAILED
            _say(_describe(error))
    return _end(code, output)


def _dispatch(arguments: list[str]) -> int:
    if arguments[:1] == ["--version"]:
        print(f"glowplug-agent {__version__}")
        return 0
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage(), file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else USAGE
    verb = arguments[0]
    module = VERBS[verb][0] if verb in VERBS else CHILDREN.get(verb)
    if module is None:
        print(f"glowplug-agent: no such verb: {verb}\n\n{_usage()}", file=sys.stderr)
        return USAGE
    result: int = importlib.import_module(module).main(arguments[1:])
    return result


def _open_standard_streams() -> bool:
    """Put /dev/null where a standard stream is closed, so that no file takes its number; False if stdout was."""
    is_open = True
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            is_open = is_open and number != 1
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free, which is this one
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115 - lives as long as the process
    return is_open


def _text(output: _Output) -> TextIO:
    """Return ``output`` as a text stream with the encoding and the buffering that stdout has."""
    now = sys.stdout
    return io.TextIOWrapper(io.BufferedWriter(output), now.encoding, now.errors, line_buffering=now.isatty())


def _end(code: int, output: _Output) -> int:
    """Return the exit code; a reader who went away is no failure, any other loss of output is one."""
    try:
        sys.stdout.flush()
    except OSError:
        pass  # told below
    if output.failure is None or output.failure.errno == errno.EPIPE:
        return code
    _say(f"stdout: {output.failure.strerror}")
    return code or FAILED


def _describe(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"glowplug-agent: {os.fsdecode(error.filename)}: {error.strerror}"
    words = " ".join(str(error).split())
    return f"glowplug-agent: internal error: {type(error).__name__}: {words} (GLOWPLUG_DEBUG=1 shows where)"


def _say(line: str) -> None:
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        pass  # nobody is left to be told


def _usage() -> str:
    lines = [f"  {verb:<10} {text}" for verb, (_, text) in VERBS.items()]
    return "usage: python -m remote_agent VERB [...]   (VERB --help says more)\n\n" + "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
