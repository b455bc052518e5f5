"""Many connections at once: none of them can block another, fill the keeper's memory or leave a descriptor in it."""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections.abc import Callable

from remote_agent.keeper.complaint import complain
from remote_agent.keeper.holdings import DESCRIPTORS_MAX, Holdings
from remote_agent.keeper.sockets import peer_of, receive
from remote_agent.keeper.words import WORDS, Answer, Words

LINE_BYTES = 256
"""The longest line; a name has at most 128."""

SAYING_S = 2.0
"""How long a client may take to say its line."""

WAITING_MAX = 64
"""Of the owner's clients that have not said their line, and of others' as many."""

LOOK_S = 1.0
"""How often a keeper looks whether its socket is still in place."""

ALL_WORDS = frozenset(WORDS)

Admit = Callable[[socket.socket], frozenset[str]]
"""Returns the words that a client may say; none where it may not be here."""


def admit_owner(link: socket.socket) -> frozenset[str]:
    """Let this user and root say everything."""
    return ALL_WORDS if peer_of(link).uid in (0, os.geteuid()) else frozenset()


class Client:
    """One connection: first it says a line, then it is a lease or over."""

    def __init__(self, link: socket.socket, allowed: frozenset[str], end: Callable[[Client], None]) -> None:
        self.link, self.allowed, self._end = link, allowed, end
        self.pid = peer_of(link).pid
        self.said = b""
        self.descriptors: list[int] = []
        self.give_up_s = time.monotonic() + SAYING_S
        self.is_lease = False

    @property
    def is_owner(self) -> bool:
        return self.allowed == ALL_WORDS

    def close(self) -> None:
        """End the connection; what it had sent and nobody took is closed."""
        self._end(self)

    def close_descriptors(self) -> None:
        while self.descriptors:
            os.close(self.descriptors.pop())


class Server:
    """The keeper's loop."""

    def __init__(self, words: Words, holdings: Holdings) -> None:
        self._words, self._holdings = words, holdings
        self._selector = selectors.DefaultSelector()
        self._clients: dict[Client, None] = {}
        self._paused: list[tuple[socket.socket, Admit]] = []
        self._going = True

    def add(self, listener: socket.socket, admit: Admit) -> None:
        """Serve ``listener`` too."""
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, admit)

    def remove(self, listener: socket.socket) -> None:
        """Serve ``listener`` no longer, and close it."""
        if listener in self._selector.get_map():
            self._selector.unregister(listener)
        self._paused = [entry for entry in self._paused if entry[0] is not listener]
        listener.close()

    def serve(self, look: Callable[[], bool]) -> None:
        """Answer until told to stop, or until ``look``, asked again and again, returns False."""
        look_s = time.monotonic() + LOOK_S
        while self._going:
            for key, _ in self._selector.select(LOOK_S / 4):
                if isinstance(key.data, Client):
                    if key.data in self._clients:  # a word of another one may have ended it
                        self._hear(key.data)
                else:
                    assert isinstance(key.fileobj, socket.socket)
                    self._accept(key.fileobj, key.data)
            now_s = time.monotonic()
            self._drop_silent(now_s)
            if now_s >= look_s:
                look_s = now_s + LOOK_S
                if not look():
                    break
                while self._paused:
                    self.add(*self._paused.pop())
        for client in list(self._clients):
            self._end(client)

    def _accept(self, listener: socket.socket, admit: Admit) -> None:
        try:
            link, _ = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            complain(f"clients can't be accepted: {error}")
            self._selector.unregister(listener)  # it would be ready again at once
            self._paused.append((listener, admit))
            return
        try:
            client = Client(link, admit(link), self._end)
        except OSError:
            link.close()
            return
        link.setblocking(False)
        if not client.allowed:
            self._send(client, Answer("error not your keeper\n"))
            link.close()
            return
        # Other users who are silent in numbers keep nobody but each other out.
        waiting = [one for one in self._clients if not one.is_lease and one.is_owner == client.is_owner]
        if len(waiting) >= WAITING_MAX:
            self._end(waiting[0])
        self._clients[client] = None
        self._selector.register(link, selectors.EVENT_READ, client)

    def _drop_silent(self, now_s: float) -> None:
        for client in [one for one in self._clients if not one.is_lease and now_s > one.give_up_s]:
            self._end(client)

    def _hear(self, client: Client) -> None:
        try:
            data, descriptors, is_cut = receive(client.link, LINE_BYTES, DESCRIPTORS_MAX)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._end(client)
            return
        client.descriptors += descriptors
        client.said += data
        if client.is_lease or not data:  # a lease says nothing more
            self._end(client)
        elif is_cut or len(client.descriptors) > DESCRIPTORS_MAX:
            self._refuse(client, f"more than {DESCRIPTORS_MAX} descriptors came")
        elif b"\n" in client.said:
            self._answer(client, client.said.partition(b"\n")[0])
        elif len(client.said) >= LINE_BYTES:
            self._refuse(client, f"a line has at most {LINE_BYTES} bytes")

    def _answer(self, client: Client, line: bytes) -> None:
        answer = self._words.answer(line.decode("ascii", "replace"), client.descriptors, client, client.allowed)
        if answer.taken:
            client.descriptors = []
        client.is_lease = answer.is_lease
        was_sent = self._send(client, answer)
        if not was_sent or not answer.is_lease:
            self._end(client)
        if answer.is_end:
            self._going = False

    def _refuse(self, client: Client, text: str) -> None:
        self._send(client, Answer(f"error {text}\n"))
        self._end(client)

    def _send(self, client: Client, answer: Answer) -> bool:
        """Send without waiting: an answer fits a socket nobody has written to. Return whether all of it went."""
        text = answer.text.encode("ascii", "replace")
        try:
            if not answer.descriptors:
                return client.link.send(text) == len(text)
            return socket.send_fds(client.link, [text], list(answer.descriptors)) == len(text)
        except OSError:
            return False

    def _end(self, client: Client) -> None:
        self._holdings.detach(client)
        client.close_descriptors()
        if client in self._clients:
            del self._clients[client]
            self._selector.unregister(client.link)
        client.link.close()
