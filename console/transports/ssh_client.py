"""What asyncssh calls back during a login: host keys are judged, and a person is asked what the server asks for."""

from __future__ import annotations

from collections.abc import Sequence

import asyncssh

from console.errors import PromptDeclined
from console.transports.ssh_identities import Identities
from console.transports.ssh_questions import Questions

BANNER_CHARACTERS = 8192


class Client(asyncssh.SSHClient):
    """Accepts no key that isn't known, and remembers the one that was shown. One connection's."""

    def __init__(self, questions: Questions, identities: Identities) -> None:
        self.shown: asyncssh.SSHKey | None = None
        self._questions, self._identities = questions, identities
        self._banner = ""
        self._passwords = self._challenges = 0
        self._is_wrong = False

    def validate_host_public_key(self, host: str, addr: str, port: int, key: asyncssh.SSHKey) -> bool:
        self.shown = key
        return False

    def validate_host_ca_key(self, host: str, addr: str, port: int, key: asyncssh.SSHKey) -> bool:
        self.shown = key
        return False

    def auth_banner_received(self, msg: str, lang: str) -> None:
        self._banner = (self._banner + msg)[:BANNER_CHARACTERS]

    async def public_key_auth_requested(self) -> list[asyncssh.SSHKeyPair] | None:
        """The files that have to be opened before anybody knows which key they hold come last."""
        while self._identities.opaque and self._questions.declined is None:
            pairs = await self._identities.open_next()
            if pairs:
                return pairs
        return None

    async def password_auth_requested(self) -> str | None:
        if not self._may_ask("a password", self._passwords):
            return None
        self._passwords += 1
        try:
            return await self._questions.password(self._passwords > 1, self._banner)
        except PromptDeclined:
            return None

    def password_change_requested(self, prompt: str, lang: str) -> tuple[str, str]:
        self._identities.notes.append("the server wants the password to be changed, which ssh can do")
        return NotImplemented  # type: ignore[no-any-return]

    def kbdint_auth_requested(self) -> str | None:
        if not self._may_ask("answers to questions of its own", self._challenges):
            return None
        self._challenges += 1
        self._is_wrong = self._challenges > 1
        return ""

    async def kbdint_challenge_received(
        self, name: str, instructions: str, lang: str, prompts: Sequence[tuple[str, bool]]
    ) -> list[str] | None:
        texts = (self._banner, name, instructions)
        if not prompts:
            self._banner = "\n".join(text for text in texts if text)[-BANNER_CHARACTERS:]
            return []
        try:
            answers = await self._questions.challenge(texts, prompts, self._is_wrong)
        except PromptDeclined:
            return None
        self._is_wrong = False
        return list(answers)

    def _may_ask(self, what: str, asked: int) -> bool:
        if self._questions.prompts is None:
            self._questions.unanswered.append(what)
            return False
        return self._questions.declined is None and asked < self._questions.target.settings.password_prompts
