"""One real request to a server, over HTTP: what came back, and when. Blocking, with a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import socket
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from remote_agent.errors import AgentError
from remote_agent.protocol.messages import Recipe, Serve

if TYPE_CHECKING:
    from http.client import HTTPResponse

ANSWER_LIMIT_BYTES = 4 << 20
CHUNK_BYTES = 1 << 16
NEW_TOKENS = 4
PROMPT_IDS = 16
"""Of a recipe without a prompt: so few token ids are in every vocabulary."""

EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Where a server is reached that listens on every address."""

WORDS_LIMIT = 200

_pool = ThreadPoolExecutor(32, "completion")

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


class NoCompletionError(AgentError):
    """There was no completion; the text says what there was instead. ``may_come``: a server that starts does that."""

    def __init__(self, text: str, may_come: bool = False) -> None:
        super().__init__(text)
        self.may_come = may_come


@dataclass(frozen=True)
class Completion:
    """``first_output_ns``: until the first byte of a streamed body, else until all was there."""

    output: str
    first_output_ns: int
    total_ns: int


def body_of(recipe: Recipe) -> bytes:
    """Return what is posted to a recipe's server."""
    assert recipe.serve is not None
    body = recipe.serve.request.body
    if body is None:
        request = recipe.request
        body = {
            "model": recipe.name,
            "prompt": request.prompt or list(range(min(request.prompt_tokens, PROMPT_IDS))),
            "max_tokens": min(request.max_new_tokens, NEW_TOKENS),
            "temperature": request.sampling.temperature,
            "stream": True,
        }
    return json.dumps(body).encode()


async def in_thread(ask: Callable[[Asked, float], Answer], what: Asked, limit_s: float) -> Answer:
    """Return ``ask(what, limit_s)``, done beside everything else; servers that hang hold up nobody but each other."""
    return await asyncio.get_running_loop().run_in_executor(_pool, ask, what, limit_s)


def ask_completion(recipe: Recipe, limit_s: float) -> Completion:
    """Post a recipe's ready request to its server and return the answer. Raises: NoCompletionError"""
    serve = recipe.serve
    assert serve is not None
    give_up = time.monotonic() + limit_s
    begun = time.monotonic_ns()
    status, kind, first_ns, data = _exchange(serve, "POST", serve.request.path, body_of(recipe), give_up)
    total_ns = time.monotonic_ns() - begun
    what = f"{serve.address}{serve.request.path}"
    if not 200 <= status < 300:
        raise NoCompletionError(f"{what} answered {status}: {_words(data)}", may_come=status == 503)
    output = output_of(data, is_stream=kind == "text/event-stream")
    if not output:  # a blank is an answer: a model may well say one
        raise NoCompletionError(f"{what} answered {status} with an empty completion, {len(data)} bytes: {_words(data)}")
    return Completion(output, first_ns - begun if kind == "text/event-stream" else total_ns, total_ns)


def ask_health(serve: Serve, limit_s: float) -> None:
    """Return if a server says that it is well. Raises: NoCompletionError"""
    assert serve.health is not None
    status, _, _, data = _exchange(serve, "GET", serve.health, None, time.monotonic() + limit_s)
    if status != 200:
        raise NoCompletionError(f"{serve.address}{serve.health} answered {status}: {_words(data)}", may_come=True)


def output_of(data: bytes, is_stream: bool) -> str:
    """Return the text of a completion's answer; of one that is not in OpenAI's style, all of it."""
    text = data.decode("utf-8", "replace")
    if not is_stream:
        return _text_of(text)
    events = [line[5:].strip() for line in text.splitlines() if line.startswith("data:")]
    return "".join(_text_of(event) for event in events if event != "[DONE]")


def _text_of(text: str) -> str:
    try:
        content = json.loads(text)
    except ValueError:
        return text
    choices = content.get("choices") if isinstance(content, Mapping) else None
    if not isinstance(choices, list):
        return text
    first = choices[0] if choices and isinstance(choices[0], Mapping) else {}
    for found in (first, first.get("message"), first.get("delta")):
        said = (found.get("text") or found.get("content")) if isinstance(found, Mapping) else None
        if isinstance(said, str):
            return said
    return ""


class _Incoming(io.RawIOBase):
    """What a socket brings until ``give_up``, however it drips: a socket's own time-out begins anew with each byte.

    Raises: TimeoutError
    """

    def __init__(self, link: socket.socket, give_up: float) -> None:
        self._link, self._give_up = link, give_up
        self._raw = link.makefile("rb", buffering=0)  # holds the connection open until this is closed

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._link.settimeout(_left_s(self._give_up))
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


def _left_s(give_up: float) -> float:
    """Return how long there is until ``give_up``. Raises: TimeoutError once there is nothing left"""
    left_s = give_up - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s


def _exchange(serve: Serve, method: str, path: str, body: bytes | None, give_up: float) -> tuple[int, str, int, bytes]:
    """Return status, content type, when the first byte of the body came, and the body."""
    import http.client

    host, what = EVERYWHERE.get(serve.host, serve.host), f"{serve.address}{path}"
    try:
        with (
            contextlib.closing(http.client.HTTPConnection(host, serve.port, timeout=_left_s(give_up))) as connection,
            contextlib.ExitStack() as opened,
        ):
            connection.connect()
            connection.sock.settimeout(_left_s(give_up))
            connection.request(method, path, body, {"Content-Type": "application/json"})
            response = opened.enter_context(http.client.HTTPResponse(connection.sock, method=method))
            response.fp.close()
            response.fp = io.BufferedReader(_Incoming(connection.sock, give_up))
            response.begin()
            data, first_ns = _receive(response, what)
            return response.status, response.headers.get_content_type(), first_ns, data
    except TimeoutError as error:
        raise NoCompletionError(f"{what} did not answer in time", may_come=True) from error
    except OSError as error:
        raise NoCompletionError(f"{what}: {error.strerror or error}", may_come=True) from error
    except http.client.HTTPException as error:
        raise NoCompletionError(
            f"{what} does not speak HTTP: {type(error).__name__}: {_words(str(error)[:80])}"
        ) from error


def _receive(response: HTTPResponse, what: str) -> tuple[bytes, int]:
    """Return a body, and when its first byte came."""
    data, first_ns = b"", 0
    while True:
        chunk = response.read1(CHUNK_BYTES)
        first_ns = first_ns or time.monotonic_ns()
        if not chunk:
            return data, first_ns
        data += chunk
        if len(data) > ANSWER_LIMIT_BYTES:
            raise NoCompletionError(f"{what} answers more than {ANSWER_LIMIT_BYTES} bytes")


def _words(said: bytes | str) -> str:
    """Return the beginning of what was said as one line."""
    text = said[: 4 * WORDS_LIMIT].decode("utf-8", "replace") if isinstance(said, bytes) else said
    shown = "".join(letter if letter.isprintable() else " " for letter in text)
    return " ".join(shown.split())[:WORDS_LIMIT] or "nothing"
