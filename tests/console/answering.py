"""Somebody who sits before the console and answers what logins ask."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from console.prompts import Prompt, PromptQueue

Answer = Sequence[str] | None
"""None: the question is declined."""


@asynccontextmanager
async def operator(answer: Callable[[Prompt], Answer]) -> AsyncIterator[tuple[PromptQueue, list[Prompt]]]:
    """A queue whose every question is answered as ``answer`` says, and what was asked so far."""
    queue, asked = PromptQueue(), list[Prompt]()

    async def work() -> None:
        while True:
            current = queue.current
            if current is not None:
                asked.append(current.prompt)
                answers = answer(current.prompt)
                queue.decline(current) if answers is None else queue.answer(current, answers)
            await asyncio.sleep(0.005)

    task = asyncio.ensure_future(work())
    try:
        yield queue, asked
    finally:
        task.cancel()
        await asyncio.wait({task})


def typed(*answers: str) -> Callable[[Prompt], Answer]:
    """One answer after the other, the last one for ever."""
    left = list(answers)
    return lambda prompt: [left.pop(0) if len(left) > 1 else left[0]] * max(1, len(prompt.fields))
