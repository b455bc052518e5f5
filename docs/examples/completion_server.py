"""A small server for a warm model, whole: OpenAI-style completions, streamed where that is asked for.

    [recipes.llama.serve]
    entry = "completion_server:serve"
    path = "/opt/examples"              # the folder on the host that has this file
    port = 8000
    health = "/health"

It needs nothing beside what the model needs. One completion at a time is computed; ``/metrics`` counts them.
"""

from __future__ import annotations

import inspect
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

MAX_BODY_BYTES = 1 << 20


def serve(model: Any, tokenizer: Any, context: Any) -> None:
    """Answer at ``context.host`` and ``context.port`` until told to stop: what a recipe's ``entry`` names."""
    server = CompletionServer((context.host, context.port), Handler)
    server.completer, server.name = Completer(model, tokenizer), context.recipe
    context.on_stop(server.shutdown)
    with server:
        server.serve_forever(poll_interval=0.05)


class Completer:
    """Asks the model. ``tokenizer`` may be None: prompts are then lists of token ids, and so are the answers."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._lock = threading.Lock()
        ends = getattr(model.generation_config, "eos_token_id", None)
        self._ends = set(ends if isinstance(ends, list) else [ends])

    def token_ids(self, prompt: object) -> list[int]:
        """Return a prompt's token ids. Raises: ValueError if it is neither text nor ids"""
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise ValueError("prompt: this model has no tokenizer, give token ids")
            prompt = self._tokenizer(prompt)["input_ids"]
        vocabulary = self._model.get_input_embeddings().weight.shape[0]
        if not isinstance(prompt, list) or not prompt:
            raise ValueError("prompt: give text, or a list of token ids")
        if not all(type(token) is int and 0 <= token < vocabulary for token in prompt):
            raise ValueError(f"prompt: token ids are whole numbers from 0 to {vocabulary - 1}")
        return prompt

    def generate(self, prompt: list[int], max_tokens: int, temperature: float) -> Iterator[str]:
        """Yield the answer's text token by token, as long as it has not ended and has fewer than ``max_tokens``."""
        tokens: list[int] = []
        said = ""
        for token in self._tokens(prompt, max_tokens, temperature):
            tokens.append(token)
            text = self._text(tokens)
            yield text[len(said) :]
            said = text

    def _tokens(self, prompt: list[int], max_tokens: int, temperature: float) -> Iterator[int]:
        takes = inspect.signature(self._model.forward).parameters
        name = "cache" if "cache" in takes else "past_key_values"  # transformers renames the one to the other
        cache = None
        ids = torch.tensor([prompt], device=self._model.device)
        for _ in range(max_tokens):
            with self._lock, torch.no_grad():
                output = self._model(input_ids=ids, use_cache=True, **{name: cache})
                logits, cache = output.logits[0, -1].float(), output[name]
                chances = torch.softmax(logits / temperature, -1) if temperature > 0 else None
                token = int(logits.argmax() if chances is None else torch.multinomial(chances, 1))
            yield token
            if token in self._ends:
                return
            ids = torch.tensor([[token]], device=self._model.device)

    def _text(self, tokens: list[int]) -> str:
        if self._tokenizer is None:
            return " ".join(map(str, tokens))
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text


class CompletionServer(ThreadingHTTPServer):
    """One model's server, with what it has counted."""

    daemon_threads = True
    request_queue_size = 128
    completer: Completer
    name: str

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.counts = {"ok": 0, "refused": 0, "failed": 0}
        self.counting = threading.Lock()

    def count(self, outcome: str) -> None:
        with self.counting:
            self.counts[outcome] += 1


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server: CompletionServer

    def do_GET(self) -> None:
        """Answer ``/health`` and ``/metrics``."""
        if self.path == "/health":
            self._answer(200, {"status": "ok", "model": self.server.name})
        elif self.path == "/metrics":
            lines = [f'completions_total{{outcome="{name}"}} {count}\n' for name, count in self.server.counts.items()]
            self._send(200, "text/plain; version=0.0.4", "".join(lines).encode())
        else:
            self._answer(404, {"error": {"message": f"nothing is at {self.path}"}})

    def do_POST(self) -> None:
        """Answer ``/v1/completions``."""
        length = self.headers.get("Content-Length") or "0"
        size = int(length) if length.isdecimal() and len(length) < 10 else -1
        if size < 0:
            self.close_connection = True
            self._answer(400, {"error": {"message": f"Content-Length: {length[:40]!r} is no number of bytes"}})
            return
        if self.path != "/v1/completions" or not 0 < size <= MAX_BODY_BYTES:
            self.close_connection = True
            self._answer(404 if size <= MAX_BODY_BYTES else 413, {"error": {"message": f"{self.path}, {size} bytes"}})
            return
        try:
            asked = json.loads(self.rfile.read(size))
            prompt = self.server.completer.token_ids(asked.get("prompt"))
            pieces = self.server.completer.generate(
                prompt, int(asked.get("max_tokens", 16)), float(asked.get("temperature", 0))
            )
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            self.server.count("refused")
            self._answer(400, {"error": {"message": str(error)}})
            return
        try:
            self._stream(pieces) if asked.get("stream") else self._complete(len(prompt), list(pieces))
        except Exception:
            self.server.count("failed")
            raise
        self.server.count("ok")

    def _complete(self, prompt_tokens: int, pieces: list[str]) -> None:
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": len(pieces)}
        self._answer(200, {**self._completion("".join(pieces)), "usage": usage})

    def _stream(self, pieces: Iterator[str]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        for piece in pieces:
            self.wfile.write(b"data: " + json.dumps(self._completion(piece)).encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")

    def _completion(self, text: str) -> dict[str, object]:
        choice = {"index": 0, "text": text, "finish_reason": None}
        return {
            "object": "text_completion",
            "created": int(time.time()),
            "model": self.server.name,
            "choices": [choice],
        }

    def _answer(self, status: int, content: dict[str, object]) -> None:
        self._send(status, "application/json", json.dumps(content).encode())

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing of what went well: the log of a server that runs for weeks is for what did not."""
