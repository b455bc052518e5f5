"""What a person is asked, one question at a time, by logins that wait for the answer.

Without a screen there is no queue, and nobody is asked. An answer is handed to who asked
and kept nowhere. What was declined is not asked again before `PromptQueue.reconsider`,
so that a link that connects by itself never asks in a loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from console.errors import PromptDeclined


@dataclass(frozen=True)
class Field:
    """One line to type. ``is_theirs``: the label is the server's, cleaned, and has to be shown as such."""

    label: str
    is_secret: bool = True
    is_theirs: bool = False


@dataclass(frozen=True)
class Prompt:
    """A question, or without ``fields`` a stop that can only be read.

    ``title`` and ``lines`` are our own words, by our own names. ``theirs``: the server's, cleaned.
    ``problem``: what was wrong with the answer before.
    """

    title: str
    lines: tuple[str, ...] = ()
    theirs: tuple[str, ...] = ()
    fields: tuple[Field, ...] = ()
    problem: str = ""


@dataclass(eq=False)
class Asked:
    """A prompt in the queue; ``askers``: how many logins wait for its answer."""

    prompt: Prompt
    about: Hashable
    is_shared: bool
    future: asyncio.Future[tuple[str, ...]] | None
    askers: int = 0


@dataclass
class PromptQueue:
    """Made once a console, used on its event loop."""

    _waiting: list[Asked] = field(default_factory=list)
    _declined: dict[Hashable, str] = field(default_factory=dict)

    @property
    def current(self) -> Asked | None:
        """The one that is shown: the oldest, until it is answered or withdrawn."""
        return self._waiting[0] if self._waiting else None

    @property
    def waiting(self) -> int:
        """How many there are, the current one included."""
        return len(self._waiting)

    async def ask(self, prompt: Prompt, about: Hashable, *, shared: bool = False) -> tuple[str, ...]:
        """Return what was typed, a text a field. Cancelled, it withdraws the question if nobody else waits for it.

        ``about``: what a person declines with this. A ``shared`` one is put once to all who ask about the same.

        Raises: PromptDeclined, at once where it has been declined before.
        """
        if about in self._declined:
            raise PromptDeclined(self._declined[about])
        asked = next((one for one in self._waiting if shared and one.is_shared and one.about == about), None)
        if asked is None:
            asked = Asked(prompt, about, shared, asyncio.get_running_loop().create_future())
            self._waiting.append(asked)
        assert asked.future is not None
        asked.askers += 1
        try:
            return await asyncio.shield(asked.future)
        finally:
            asked.askers -= 1
            if not asked.askers:
                self._remove(asked)
                asked.future.cancel()

    def tell(self, prompt: Prompt, about: Hashable) -> None:
        """Show a stop, once until `reconsider`; nobody waits for it to be read."""
        if about not in self._declined and all(one.about != about for one in self._waiting):
            self._waiting.append(Asked(prompt, about, True, None))

    def answer(self, asked: Asked, answers: Sequence[str]) -> None:
        """Hand on what was typed. Nothing happens where the question is withdrawn."""
        if not self._remove(asked):
            return
        if asked.future is None:
            self._declined[asked.about] = ""
        elif not asked.future.done():
            asked.future.set_result(tuple(answers))

    def decline(self, asked: Asked) -> None:
        """Have everyone who waits for it fail, and whoever asks about the same later."""
        if asked.future is None:
            self.answer(asked, ())
        else:
            self.refuse(asked.about, f"{asked.prompt.title}: it was asked for and not given; reconnecting asks again")

    def decline_all(self) -> None:
        """Decline whatever waits."""
        while self._waiting:
            self.decline(self._waiting[0])

    def refuse(self, about: Hashable, reason: str) -> None:
        """Ask no more about this, for ``reason``; who waits for it fails."""
        self._declined[about] = reason
        for asked in [one for one in self._waiting if one.about == about]:
            self._remove(asked)
            if asked.future is not None and not asked.future.done():
                asked.future.set_exception(PromptDeclined(reason))

    def reconsider(self) -> None:
        """A person wants to reconnect: what was declined may be asked again."""
        self._declined.clear()

    def _remove(self, asked: Asked) -> bool:
        """Say whether it was still there."""
        if asked not in self._waiting:
            return False
        self._waiting.remove(asked)
        return True
