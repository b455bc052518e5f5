"""A small HTTP server whose answer is its name, and whose health, errors and slowness a test decides."""

from __future__ import annotations

import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

LONGEST_S = 20.0


class Web:
    """``/`` answers with the name, ``/health`` 200 or 503, ``/fail`` 500, ``/hold`` once `release` is called."""

    def __init__(self, name: str) -> None:
        self.name, self.is_healthy = name, True
        self._released = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def release(self) -> None:
        """Let everything that is held be answered."""
        self._released.set()

    def stop(self) -> None:
        """Answer nothing any more; its port refuses connections."""
        self.release()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _answer(self, path: str) -> tuple[int, str]:
        if path == "/health":
            return (200 if self.is_healthy else 503), "health"
        if path == "/hold":
            self._released.wait(LONGEST_S)
        return (500 if path == "/fail" else 200), self.name

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        answer = self._answer

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, text = answer(self.path)
                try:
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(text)))
                    self.end_headers()
                    self.wfile.write(text.encode())
                except OSError:  # HAProxy has ended the session
                    pass

            def log_message(self, format: str, *args: object) -> None:
                pass

        return Handler


class Answering:
    """Says the same to everybody who connects, and closes; None: says nothing and keeps the connection."""

    def __init__(self, answer: bytes | None) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._answer = answer
        self._kept: list[socket.socket] = []
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def stop(self) -> None:
        """Close everything."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        for connection in (self._listener, *self._kept):
            connection.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # shut down
                return
            if self._answer is None:
                self._kept.append(connection)
                continue
            with connection:
                try:
                    connection.sendall(self._answer)
                    connection.shutdown(socket.SHUT_WR)
                    connection.recv(4096)  # what is closed with a question unread is reset, the answer lost
                except OSError:  # who asked did not wait
                    pass
