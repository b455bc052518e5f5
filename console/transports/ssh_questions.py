"""What one login may have to ask a person, in our words; what the server says is cleaned and kept apart.

While an answer is waited for, the login's time stands still and its places are others'. A
declined question ends the login: nothing else is asked for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from console.clean import clean, clean_lines
from console.errors import HostKeyChanged, HostKeyUnknown, PromptDeclined
from console.prompts import Field, Prompt, PromptQueue
from console.transports.patience import Patience, Place
from console.transports.ssh_target import Target

FIELD_LIMIT = 8
LABEL_CHARACTERS = 120
THEIR_LINES = 12
THEIR_CHARACTERS = 200
WORDS_FOR_YES, WORDS_FOR_NO = ("yes",), ("no",)


class Questions:
    """Of one login. ``unanswered``: what the server would have taken where nobody can be asked."""

    def __init__(self, target: Target, prompts: PromptQueue | None, on_the_way_to: str | None = None) -> None:
        self.target = target
        self.prompts = None if target.settings.batch_mode else prompts
        self.place = f"{target.label}, on the way to {on_the_way_to}" if on_the_way_to else target.label
        self.declined: PromptDeclined | None = None
        self.was_asked = False
        self.unanswered: list[str] = []
        self._patience: Patience | None = None
        self._places: list[Place] = []

    def holds(self, place: Place) -> None:
        """Say what is given back, from now on, when somebody is asked."""
        self._places.append(place)

    def begins(self, patience: Patience) -> None:
        """Say which time stands still: that of the connection that begins."""
        self._patience, self.was_asked = patience, False

    def nobody(self) -> str:
        """Return why nobody is asked here."""
        return "BatchMode rules out" if self.target.settings.batch_mode else "only the console (`glowplug`) asks for"

    def lost_reason(self) -> str | None:
        """Return what a connection that was lost was waiting for, None where nobody was asked on it."""
        return "the server did not wait for the answer to its question" if self.was_asked else None

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """Let the time stand still and others have the places. Keeps what was declined. Raises: PromptDeclined."""
        self.was_asked = True
        for place in self._places:
            place.give_back()
        try:
            with self._patience.paused() if self._patience is not None else contextlib.nullcontext():
                yield
        except PromptDeclined as error:
            self.declined = error
            raise

    async def about_host_key(self, error: HostKeyUnknown) -> None:
        """Return once a person has typed ``yes`` or the key's fingerprint. Raises: PromptDeclined."""
        assert self.prompts is not None
        about = ("host key", error.host, error.port, error.fingerprint)
        where = f"{error.host} port {error.port}" if error.host != self.target.label else f"port {error.port}"
        lines = (
            f"Nothing here knows the host key of {where}.",
            f"Accepted, it goes to {error.known_hosts_file}",
            f"{error.kind} key, fingerprint",
            error.fingerprint,
        )
        problem = ""
        while True:
            fields = (Field("Type yes or the fingerprint", is_secret=False),)
            prompt = Prompt(f"{self.place}: unknown host key", lines, fields=fields, problem=problem)
            with self.asking():
                (answer,) = await self.prompts.ask(prompt, about, shared=True)
            if answer.strip().lower() in WORDS_FOR_YES or answer.strip() == error.fingerprint:
                return
            if answer.strip().lower() in WORDS_FOR_NO:
                reason = f"{prompt.title}: {error.fingerprint} was not accepted; reconnecting asks again"
                self.prompts.refuse(about, reason)
            problem = "That is neither yes nor this fingerprint."

    def tell_stop(self, error: HostKeyChanged) -> None:
        """Show why there is no login, with nothing to accept."""
        if self.prompts is not None:
            shown = (f"{error.kind} key, fingerprint", error.fingerprint) if error.fingerprint else ()
            known = ("known_hosts has", *error.entries) if error.entries else ()
            why = ("Somebody may be listening, or the host was set up anew.",) if error.entries else ()
            lines = (f"{error.what}.", *shown, *known, *why, "Glowplug does not connect.")
            prompt = Prompt(f"{self.place}: stopped", lines)
            self.prompts.tell(prompt, ("stop", error.host, error.port, str(error)))

    async def password(self, is_wrong: bool, banner: str) -> str:
        """Raises: PromptDeclined."""
        prompt = Prompt(
            f"{self.place}: password",
            (f"of {self.target.user} at {self.target.host} port {self.target.port}",),
            theirs=_theirs(banner),
            fields=(Field("Password"),),
            problem="The password was not accepted." if is_wrong else "",
        )
        (answer,) = await self._ask(prompt)
        return answer

    async def challenge(
        self, texts: Sequence[str], prompts: Sequence[tuple[str, bool]], is_wrong: bool
    ) -> tuple[str, ...]:
        """Return an answer for each of the server's ``prompts``: its text, and whether typing may be seen.

        Raises: PromptDeclined, also for more of them than anybody would answer.
        """
        if len(prompts) > FIELD_LIMIT:
            self.declined = PromptDeclined(f"{self.place}: the server asks for {len(prompts)} answers at once")
            raise self.declined
        labels = [clean(text, LABEL_CHARACTERS).strip() or "?" for text, _ in prompts]
        prompt = Prompt(
            f"{self.place}: the server asks",
            (f"to let {self.target.user} in at {self.target.host} port {self.target.port}",),
            theirs=_theirs(*texts),
            fields=tuple(
                Field(label, is_secret=not echo, is_theirs=True)
                for label, (_, echo) in zip(labels, prompts, strict=True)
            ),
            problem="The answer was not accepted." if is_wrong else "",
        )
        return await self._ask(prompt)

    async def passphrase(self, path: Path, is_wrong: bool) -> str:
        """Ask for everyone who needs the key. Raises: PromptDeclined."""
        assert self.prompts is not None
        problem = "The passphrase is wrong." if is_wrong else ""
        lines = (f"First needed for {self.place}; it is kept in memory until Glowplug ends.",)
        prompt = Prompt(f"{path}: passphrase of the key", lines, fields=(Field("Passphrase"),), problem=problem)
        (answer,) = await self.prompts.ask(prompt, ("key", path), shared=True)
        return answer

    def refuse_key(self, path: Path, reason: str) -> PromptDeclined:
        """Have nobody asked for the key's passphrase any more; return the error that says why."""
        assert self.prompts is not None
        self.prompts.refuse(("key", path), reason)
        return PromptDeclined(reason)

    async def _ask(self, prompt: Prompt) -> tuple[str, ...]:
        assert self.prompts is not None
        with self.asking():
            return await self.prompts.ask(prompt, self.target)


def _theirs(*texts: str) -> tuple[str, ...]:
    lines = [line for text in texts for line in clean_lines(text, THEIR_LINES, THEIR_CHARACTERS)]
    return tuple(lines[-THEIR_LINES:])
