"""A client of a load balancer that asks all the time, and notes who answered what while servers were what."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tests.end_to_end.haproxy import LoadBalancer

PACE_S, PACE_OF_STEPS_S = 0.25, 0.05
"""Between two requests, and while a server has a part of its weight: then shares are to be seen."""

_DRAINED = 0x01 | 0x04 | 0x08
"""Of ``srv_admin_state``: in maintenance or drained, whoever said so (management.txt, `show servers state`)."""


@dataclass(frozen=True)
class Answer:
    """One request. ``server``: who answered, None where it failed. ``weights``: of all that have traffic, before it was
    sent; ``is_steady``: after it was answered they were the same."""

    server: str | None
    text: str
    answered_ns: int
    weights: Mapping[str, int]
    is_steady: bool


class Client:
    """Sends completions through ``balancer``, one after the other, until it is left. ``prompt``: token ids."""

    def __init__(self, balancer: LoadBalancer, backend: str, prompt: list[int]) -> None:
        self._balancer, self._backend = balancer, backend
        self._body = json.dumps({"prompt": prompt, "max_tokens": 1})
        self._answers: list[Answer] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._go_on)

    def __enter__(self) -> Client:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def answers(self) -> tuple[Answer, ...]:
        return tuple(self._answers)

    def weights(self) -> dict[str, int]:
        """Return the weight of each server that HAProxy gives traffic."""
        rows = [line.split() for line in self._balancer.ask(f"show servers state {self._backend}").splitlines()]
        columns = {name: number for number, name in enumerate(rows[1][1:])}
        found = {}
        for row in rows[2:]:
            if row and not int(row[columns["srv_admin_state"]]) & _DRAINED:
                found[row[columns["srv_name"]]] = int(row[columns["srv_uweight"]])
        return found

    def _go_on(self) -> None:
        before = self.weights()
        while not self._over.wait(PACE_S if len(set(before.values())) == 1 else PACE_OF_STEPS_S):
            server, text = self._ask()
            answered_ns, after = time.time_ns(), self.weights()
            self._answers.append(Answer(server, text, answered_ns, before, before == after))
            before = after

    def _ask(self) -> tuple[str | None, str]:
        link = http.client.HTTPConnection("127.0.0.1", self._balancer.port, timeout=30)
        try:
            link.request("POST", "/v1/completions", self._body)
            with link.getresponse() as answer:
                content = answer.read().decode()
                if answer.status != 200:
                    return None, f"{answer.status}: {content[:200]}"
                return answer.headers["X-Served-By"], json.loads(content)["choices"][0]["text"]
        except (OSError, http.client.HTTPException) as error:
            return None, repr(error)
        finally:
            link.close()


def texts_of(answers: Iterable[Answer], server: str) -> list[str]:
    """Return what a server has said, each text once for every time that it began to say it."""
    told: list[str] = []
    for one in answers:
        if one.server == server and one.text not in told[-1:]:
            told.append(one.text)
    return told


def shares(answers: Iterable[Answer]) -> dict[tuple[tuple[str, int], ...], Counter[str]]:
    """Return, for each set of weights that a request was sent and answered under, who answered how often."""
    found: dict[tuple[tuple[str, int], ...], Counter[str]] = {}
    for one in answers:
        if one.is_steady and one.server is not None:
            found.setdefault(tuple(sorted(one.weights.items())), Counter())[one.server] += 1
    return found
