"""What the user's own ssh makes of a host: ``ssh -G`` is asked, which knows Include, Match, tokens and all the rest.

An answer holds for one wave of connects, those that overlap in time: three hundred nodes
behind one bastion ask about it once, and whoever connects later asks anew, since nobody
can say of which files, programs and networks an answer was made.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field

from console.clean import clean, clean_lines
from console.errors import NodeMisconfigured
from console.transports.base import TimedOut, bounded, unbroken

ORACLE_TIMEOUT_S = 10.0
END_TIMEOUT_S = 2.0
ANSWER_BYTES = 1 << 20
ASK_LIMIT = 4
"""Processes at once. One takes some 10 ms, but a ``Match exec`` of the user's may take its time."""

Settings = Mapping[str, tuple[str, ...]]
"""Values by key in lower case, in order; a key may come more than once."""


class NoClient(Exception):
    """No ssh client is installed."""


@dataclass(frozen=True)
class Question:
    """What ``ssh -G`` is asked. ``file``: in place of the user's and the system's configuration."""

    host: str
    user: str | None = None
    port: int | None = None
    file: str | None = None

    def arguments(self) -> list[str]:
        """Return what stands after ``ssh``."""
        return ["-G", *self._options(), "--", self.host]

    def by_hand(self) -> list[str]:
        """Return what stands after ``ssh`` for a login by hand."""
        return [*self._options(), self.host]

    def _options(self) -> list[str]:
        options = [*(["-F", self.file] if self.file else []), *(["-l", self.user] if self.user else [])]
        return [*options, *(["-p", str(self.port)] if self.port else [])]


@dataclass
class Oracle:
    """Made once a console. ``environ``: of the processes; None: this process's own."""

    ssh: str
    environ: Mapping[str, str] | None = None
    _places: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(ASK_LIMIT))
    _answers: dict[Question, asyncio.Task[Settings]] = field(default_factory=dict)
    _usual: asyncio.Task[Settings] | None = None
    _askers: int = 0

    async def __aenter__(self) -> Oracle:
        """Take part in the wave that is going on, or begin one."""
        self._askers += 1
        return self

    async def __aexit__(self, *_: object) -> None:
        self._askers -= 1
        if self._askers:
            return
        unfinished = [task for task in (*self._answers.values(), self._usual) if task is not None and not task.done()]
        self._answers.clear()
        if self._usual in unfinished:
            self._usual = None
        for task in unfinished:
            task.cancel()
        if unfinished:
            await asyncio.wait(unfinished, timeout=END_TIMEOUT_S)

    async def ask(self, label: str, question: Question) -> Settings:
        """Return ssh's answer; ``label`` is our name for the node, for errors.

        Raises: NoClient; NodeMisconfigured with what ssh says, or that it said nothing in time.
        """
        task = self._answers.get(question)
        if task is None:
            task = self._answers[question] = self._start(question)
        try:
            return await asyncio.shield(task)
        except NodeMisconfigured as error:
            raise NodeMisconfigured(f"{label}: {error}") from error

    async def usual(self) -> Settings:
        """Return what this ssh does for a host that no configuration names; nothing where it can't be asked."""
        if self._usual is None:
            # The empty file, by its name for ssh: settings that differ from these were set by somebody.
            self._usual = self._start(Question("host.invalid", file="none"))
        try:
            return await asyncio.shield(self._usual)
        except (NoClient, NodeMisconfigured):
            self._usual = None
            return {}

    def _start(self, question: Question) -> asyncio.Task[Settings]:
        task = asyncio.ensure_future(self._run(question))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # whoever asked may be gone
        return task

    async def _run(self, question: Question) -> Settings:
        async with self._places:
            process = await self._start_process(question)
            is_over = False
            try:
                output, errors = await bounded(_read(process), ORACLE_TIMEOUT_S)
                code = await bounded(process.wait(), ORACLE_TIMEOUT_S)
                is_over = True
            except TimedOut as error:
                raise NodeMisconfigured(f"`ssh -G` did not answer within {ORACLE_TIMEOUT_S:g} s") from error
            finally:
                await unbroken(_let_go(process, is_over))
        if code != 0:
            said = " / ".join(clean_lines(errors, 3)) or f"it ended with {code}"
            raise NodeMisconfigured(clean(f"`ssh -G` says: {said}"))
        return parse(os.fsdecode(output))

    async def _start_process(self, question: Question) -> asyncio.subprocess.Process:
        starting = asyncio.ensure_future(
            asyncio.create_subprocess_exec(
                self.ssh,
                *question.arguments(),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env={**(os.environ if self.environ is None else self.environ), "LC_ALL": "C"},
                start_new_session=True,  # what a Match exec has started is ended with it
            )
        )
        try:
            return await unbroken(starting)
        except asyncio.CancelledError:
            if not starting.cancelled() and starting.exception() is None:
                await _let_go(starting.result(), is_over=False)
            raise
        except FileNotFoundError as error:
            raise NoClient(self.ssh) from error
        except (OSError, ValueError) as error:
            raise NodeMisconfigured(clean(f"{self.ssh}: {error}")) from error


def parse(text: str) -> Settings:
    """Return the settings of an answer.

    Raises: NodeMisconfigured for what isn't one.
    """
    settings: dict[str, tuple[str, ...]] = {}
    for line in text.split("\n"):
        key, _, value = line.partition(" ")
        if key:
            settings[key.lower()] = (*settings.get(key.lower(), ()), value.strip())
    port = settings.get("port", ("",))[0]
    if not settings.get("hostname") or not (port.isascii() and port.isdigit() and 1 <= int(port) < 65536):
        first = text.strip().split("\n")[0][:80]
        raise NodeMisconfigured(clean(f"`ssh -G` gave no answer that can be read: {first!r}"))
    return settings


async def _read(process: asyncio.subprocess.Process) -> tuple[bytes, bytes]:
    assert process.stdout is not None
    assert process.stderr is not None
    output, errors = await asyncio.gather(_read_some(process.stdout), _read_some(process.stderr))
    return output, errors


async def _read_some(stream: asyncio.StreamReader) -> bytes:
    data = b""
    while more := await stream.read(65536):
        data += more
        if len(data) > ANSWER_BYTES:
            raise NodeMisconfigured(f"`ssh -G` wrote more than {ANSWER_BYTES >> 20} MiB")
    return data


async def _let_go(process: asyncio.subprocess.Process, is_over: bool) -> None:
    """Free its pipes; what isn't over is killed with all that it has started."""
    if not is_over:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        try:
            await bounded(process.wait(), END_TIMEOUT_S)
        except TimedOut:
            pass  # asyncio waits for the pipes too, which something may hold that left the session
    process._transport.close()  # type: ignore[attr-defined]
