"""Asks several nodes at once: what answers is shown, what does not is said, and decides the exit code."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import click

from console.clean import clean
from console.cli.common import Context, emit
from console.config import Config
from console.errors import GlowplugError
from console.fleet import Fleet

T = TypeVar("T")


@dataclass(frozen=True)
class Answer(Generic[T]):
    """Of one node; exactly one of ``value`` and ``error`` is there."""

    node: str
    value: T | None = None
    error: GlowplugError | None = None

    @property
    def problem(self) -> str | None:
        """The error in words."""
        return str(self.error) if self.error is not None else None


async def ask(
    context: Context, config: Config, names: Sequence[str], question: Callable[[Fleet, str], Awaitable[T]]
) -> list[Answer[T]]:
    """Put ``question`` to every node at once and return their answers in order."""

    async def one(fleet: Fleet, name: str) -> Answer[T]:
        try:
            return Answer(name, await question(fleet, name))
        except GlowplugError as error:
            return Answer(name, error=error)

    async with context.fleet(config, names) as fleet:
        return list(await asyncio.gather(*(one(fleet, name) for name in names)))


def show(
    answers: Sequence[Answer[T]],
    as_json: bool,
    document: Callable[[Answer[T]], Mapping[str, object]],
    lines: Callable[[Answer[T]], Iterable[str]],
) -> int:
    """Print one document of all nodes, or the lines of each, cleaned; return the exit code."""
    if as_json:
        emit({"nodes": [{"node": one.node, "error": one.problem, **document(one)} for one in answers]})
    else:
        for answer in answers:
            for line in lines(answer):
                click.echo(clean(line, 1000))
    return exit_code(answers)


def exit_code(answers: Sequence[Answer[T]]) -> int:
    """Return 0 if all answered, else the lowest code among what went wrong."""
    return min((answer.error.exit_code for answer in answers if answer.error is not None), default=0)
