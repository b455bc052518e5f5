"""Private keys that were opened with a passphrase: in memory alone, each asked about once, whoever needs it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import asyncssh

from console.errors import PromptDeclined
from console.transports.gate import Shared
from console.transports.ssh_questions import Questions

PASSPHRASE_TRIES = 3

OpenKey = Callable[[Path], Awaitable[asyncssh.SSHKey]]
"""Raises: PromptDeclined; OSError and ValueError for a file of no use."""


async def open_key(path: Path, opened: dict[Path, Shared[Any]], questions: Questions) -> asyncssh.SSHKey:
    """Return the private key in ``path``; ``opened`` has those of all logins.

    Raises: PromptDeclined; OSError and ValueError for a file of no use.
    """
    shared = opened.get(path)
    if shared is None or not shared.users:
        shared = opened[path] = Shared(lambda: _open(path, questions), _forget, lambda _: True)
    try:
        with contextlib.nullcontext() if shared.is_there else questions.asking():
            key: asyncssh.SSHKey = await shared.acquire()  # and never released: it serves the next login too
            return key
    except BaseException:
        await shared.release()
        raise


async def _open(path: Path, questions: Questions) -> asyncssh.SSHKey:
    for attempt in range(PASSPHRASE_TRIES):
        passphrase = await questions.passphrase(path, is_wrong=attempt > 0)
        try:
            return await asyncio.to_thread(asyncssh.read_private_key, path, passphrase)
        except (asyncssh.KeyEncryptionError, asyncssh.KeyImportError):
            continue
    raise questions.refuse_key(
        path, f"{path}: its passphrase was wrong {PASSPHRASE_TRIES} times; reconnecting asks again"
    )


async def _forget(_: asyncssh.SSHKey) -> None:
    """A key leaves nothing to close."""


class LockedPair(asyncssh.SSHKeyPair):
    """A key pair whose public half is known; its file is opened once a server wants a signature of it, as ssh does."""

    def __init__(
        self,
        public: asyncssh.SSHKey,
        certificate: asyncssh.SSHCertificate | None,
        path: Path,
        open_it: OpenKey,
    ) -> None:
        names = public.sig_algorithms
        super().__init__(public.algorithm, public.algorithm, names, names, public.public_data, None, certificate)
        self._path, self._open = path, open_it

    async def sign_async(self, data: bytes) -> bytes:
        """Raises: ValueError, at which asyncssh goes on to what else there is."""
        try:
            key = await self._open(self._path)
        except (PromptDeclined, OSError) as error:
            raise ValueError(str(error)) from error
        if key.public_data != self.key_public_data:
            raise ValueError(f"{self._path} and its public half don't belong together")
        signature: bytes = key.sign(data, self.sig_algorithm)
        return signature
