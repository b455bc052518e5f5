"""The example server of the documentation: what it answers to requests that it can't serve."""

from __future__ import annotations

import http.client
import importlib.util
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PATH = Path(__file__).parents[1] / "docs/examples/completion_server.py"


class Echo:
    """Takes any list for a prompt and says it again."""

    def token_ids(self, prompt: object) -> list[int]:
        if not isinstance(prompt, list):
            raise ValueError("prompt: give a list")
        return prompt

    def generate(self, prompt: list[int], max_tokens: int, temperature: float) -> Iterator[str]:
        yield from map(str, prompt[:max_tokens])


@pytest.fixture
def server() -> Iterator[Any]:
    spec = importlib.util.spec_from_file_location("completion_server", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with module.CompletionServer(("127.0.0.1", 0), module.Handler) as server:
        server.completer, server.name = Echo(), "echo"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def post(server: Any, body: bytes, length: str | None = None) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection(*server.server_address, timeout=30)
    try:
        connection.putrequest("POST", "/v1/completions")
        connection.putheader("Content-Length", length if length is not None else str(len(body)))
        connection.endheaders()
        connection.send(body)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def test_a_completion_is_answered(server: Any) -> None:
    """As OpenAI's are."""
    status, answer = post(server, b'{"prompt": [1, 2, 3], "max_tokens": 2}')

    assert (status, answer["choices"][0]["text"]) == (200, "12")


@pytest.mark.parametrize(
    "body",
    [b"[1]", b"{", b'{"prompt": "text"}', b'{"prompt": [1], "max_tokens": 1e999}', b"[" * 100_000],
    ids=["no object", "half", "text", "endless", "deep"],
)
def test_a_request_that_can_not_be_served_is_answered_400(server: Any, body: bytes) -> None:
    """In words, and counted as refused."""
    status, answer = post(server, body)

    assert status == 400
    assert answer["error"]["message"]
    assert server.counts["refused"] == 1


@pytest.mark.parametrize("length", ["-1", "many", "9" * 50])
def test_a_length_that_is_none_is_answered_400(server: Any, length: str) -> None:
    """Nothing is read of what follows."""
    status, answer = post(server, b"{}", length)

    assert status == 400
    assert answer["error"]["message"].startswith("Content-Length: ")
