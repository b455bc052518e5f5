"""One request to a server: what counts as a completion, when it came, and one line for everything else."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from remote_agent.agentd.completion import NoCompletionError, ask_completion, body_of, output_of
from remote_agent.protocol.messages import FirstRequest, ModelSource, ReadyRequest, Recipe, Sampling, Serve

LIMIT_S = 20.0

Answer = Callable[[BaseHTTPRequestHandler], None]


def recipe(port: int = 1, request: ReadyRequest | None = None) -> Recipe:
    return Recipe("llama", ModelSource("/m"), serve=Serve("m:f", port, request=request or ReadyRequest()))


@pytest.fixture
def answering() -> Iterator[Callable[[Answer], int]]:
    """Return a function that starts a server which answers every POST as told, and gives its port."""
    servers: list[ThreadingHTTPServer] = []

    def start(answer: Answer) -> int:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                answer(self)

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        return server.server_port

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def send(handler: BaseHTTPRequestHandler, kind: str, *parts: bytes, status: int = 200) -> None:
    handler.send_response(status)
    handler.send_header("Content-Type", kind)
    handler.end_headers()
    for part in parts:
        handler.wfile.write(part)


def wait(event: threading.Event) -> None:
    event.wait(LIMIT_S)


def problem(port: int, limit_s: float = LIMIT_S) -> NoCompletionError:
    with pytest.raises(NoCompletionError) as caught:
        ask_completion(recipe(port), limit_s)
    return caught.value


def test_the_first_byte_of_a_stream_is_the_first_output(answering: Callable[[Answer], int]) -> None:
    """The second half is held back until the first has been seen to be sent; a whole answer has one time alone."""
    first, rest = b'data: {"choices": [{"text": "7 "}]}\n\n', b'data: {"choices": [{"text": "9"}]}\n\ndata: [DONE]\n\n'
    pause = threading.Event()

    def stream(handler: BaseHTTPRequestHandler) -> None:
        send(handler, "text/event-stream", first)
        pause.wait(0.05)
        handler.wfile.write(rest)

    streamed = ask_completion(recipe(answering(stream)), LIMIT_S)
    whole = ask_completion(
        recipe(answering(lambda handler: send(handler, "application/json", b'{"choices": [{"text": "7 9"}]}'))), LIMIT_S
    )

    assert (streamed.output, whole.output) == ("7 9", "7 9")
    assert streamed.first_output_ns < streamed.total_ns
    assert whole.first_output_ns == whole.total_ns


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ('{"choices": [{"text": "ab"}]}', "ab"),
        ('{"choices": [{"message": {"content": "ab"}}]}', "ab"),
        ('{"choices": []}', ""),
        ('{"choices": [7]}', ""),
        ('{"embedding": [1]}', '{"embedding": [1]}'),
        ("no JSON", "no JSON"),
        ('"ab"', '"ab"'),
    ],
)
def test_the_text_of_an_answer_is_found(data: str, text: str) -> None:
    """In OpenAI's two styles; whatever is in neither is taken as it is."""
    assert output_of(data.encode(), is_stream=False) == text


def test_a_recipe_s_own_request_is_asked_by_default() -> None:
    """Its prompt, or token ids that every vocabulary has; few new tokens; a body of its own is sent as it stands."""
    text = json.loads(body_of(recipe()))
    assert (text["model"], text["prompt"], text["max_tokens"], text["stream"]) == ("llama", list(range(16)), 1, True)
    asked = FirstRequest(prompt="Hello", max_new_tokens=99, sampling=Sampling(0.5))
    told = json.loads(body_of(replace(recipe(), request=asked)))
    assert (told["prompt"], told["max_tokens"], told["temperature"]) == ("Hello", 4, 0.5)
    assert json.loads(body_of(recipe(request=ReadyRequest(body={"inputs": "x"})))) == {"inputs": "x"}


def test_what_is_no_completion_is_told_in_one_line(answering: Callable[[Answer], int]) -> None:
    """With the address, the status and what was said; only what a server says that starts may be asked again."""
    busy = answering(lambda handler: send(handler, "text/plain", b"loading\nmodel", status=503))
    broken = answering(lambda handler: send(handler, "text/plain", b"x" * 9000, status=500))
    blank = answering(lambda handler: send(handler, "application/json", b'{"choices": [{"text": ""}]}'))
    told = [problem(port) for port in (busy, broken, blank)]

    assert [one.may_come for one in told] == [True, False, False]
    assert str(told[0]) == f"127.0.0.1:{busy}/v1/completions answered 503: loading model"
    assert str(told[1]).endswith(f"answered 500: {'x' * 200}")
    assert "answered 200 with an empty completion, 27 bytes" in str(told[2])


def test_a_server_that_is_silent_or_no_server_is_told(answering: Callable[[Answer], int]) -> None:
    """Late, refused, or something else than HTTP."""
    hold = threading.Event()
    late = problem(answering(lambda handler: wait(hold)), 0.1)
    hold.set()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        refused = problem(listener.getsockname()[1])
        listener.listen()

        def speak() -> None:
            link, _ = listener.accept()
            with link:
                link.recv(65536)
                link.sendall(b"\x1b[2J220 mail.example\r ESMTP\r\n")

        talking = threading.Thread(target=speak)
        talking.start()
        other = problem(listener.getsockname()[1])
        talking.join()

    assert (late.may_come, str(late).endswith("did not answer in time")) == (True, True)
    assert (refused.may_come, str(refused).endswith("/v1/completions: Connection refused")) == (True, True)
    assert (other.may_come, "HTTP: BadStatusLine: [2J220 mail.example ESMTP" in str(other)) == (False, True)


@pytest.mark.parametrize(
    "answer",
    [b"HTTP/1.1 200 OK\r\nX-Slow: ", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b""],
    ids=["header", "chunks", "nothing but going on"],
)
def test_a_server_that_drips_has_as_long_as_one_that_is_silent(answer: bytes) -> None:
    """Each byte comes in time and the whole never; "100 Continue" for ever is no answer either."""
    drip, ended = b"7" if answer else b"HTTP/1.1 100 Continue\r\n\r\n", threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def speak() -> None:
            link, _ = listener.accept()
            with link:
                link.recv(65536)
                try:
                    link.sendall(answer)
                    while not ended.wait(0.01):
                        link.sendall(drip)
                except OSError:
                    ended.set()  # whoever asked has gone

        talking = threading.Thread(target=speak)
        talking.start()
        late = problem(listener.getsockname()[1], 0.2)
        assert ended.wait(LIMIT_S), "the connection is left open"
        talking.join()

    assert (late.may_come, str(late).endswith("did not answer in time")) == (True, True)
