"""What each word does. No sockets here: a line and its descriptors in, an answer out."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from remote_agent.keeper.devices import DeviceHold
from remote_agent.keeper.holdings import Holdings, Lease, Refused

FOR_OTHERS = frozenset(("list", "show", "get"))
"""What another user may ask who is allowed to attach."""

WORDS = ("hold", "release", "status", "stop", "stop!", "put", "list", "show", "get", "drop", "drop!")
NAMING = frozenset(("put", "show", "get", "drop", "drop!"))


class Answer(NamedTuple):
    """``descriptors`` go along and stay the keeper's. ``taken``: those that came are the keeper's now."""

    text: str
    descriptors: Sequence[int] = ()
    taken: bool = False
    is_lease: bool = False
    is_end: bool = False


class Words:
    """Does what a line asks."""

    def __init__(self, devices: DeviceHold, holdings: Holdings) -> None:
        self._devices, self._holdings = devices, holdings

    def answer(self, line: str, descriptors: Sequence[int], asker: Lease, allowed: frozenset[str]) -> Answer:
        """Return what ``line`` comes to; a refusal is an answer too."""
        word, _, name = line.partition(" ")
        try:
            if word not in WORDS:
                raise Refused(f"words are: {' '.join(WORDS)}")
            if word not in allowed:
                raise Refused(f"{word} is not for you: you may {' '.join(sorted(allowed)) or 'nothing'}")
            if (word in NAMING) != bool(name):
                raise Refused(f"{word} {'names a resident' if word in NAMING else 'stands alone'}")
            if descriptors and word != "put":
                raise Refused(f"{word} takes no descriptors; {len(descriptors)} came")
            return self._do(word, name, descriptors, asker)
        except Refused as refusal:
            return Answer(f"error {refusal}\n")

    def _do(self, word: str, name: str, descriptors: Sequence[int], asker: Lease) -> Answer:
        holdings = self._holdings
        if word == "put":
            holdings.put(name, descriptors)
            return Answer(_ok(holdings.count), taken=True)
        if word == "list":
            return Answer(_ok(holdings.count) + "".join(f"{line}\n" for line in holdings.lines()))
        if word == "show":
            return Answer(_ok(1), (holdings.manifest(name),))
        if word == "get":
            held = holdings.attach(name, asker)
            return Answer(_ok(len(held)), held, is_lease=True)
        if word in ("drop", "drop!"):
            holdings.drop(name, force=word == "drop!")
            return Answer(_ok(holdings.count))
        return self._do_with_devices(word)

    def _do_with_devices(self, word: str) -> Answer:
        if word in ("release", "stop") and self._holdings.count:
            instead = "; stop! ends all the same" if word == "stop" else ""
            raise Refused(f"residents are held: {self._holdings.count}; drop them first{instead}")
        if word == "stop!":
            self._holdings.drop_all()
        if word == "hold":
            self._devices.hold()
        elif word != "status":
            self._devices.release()
        return Answer(_ok(self._devices.count), is_end=word in ("stop", "stop!"))


def _ok(count: int) -> str:
    return f"ok {count} {os.getpid()}\n"
