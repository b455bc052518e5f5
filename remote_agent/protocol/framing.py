"""Newline-delimited frames with a hard limit, and the mark that ends login noise. No I/O here."""

from __future__ import annotations

from remote_agent.protocol.version import FRAME_LIMIT_BYTES, PROTOCOL_MAX, PROTOCOL_MIN

NOISE_LIMIT_BYTES = 4 << 20


class ProtocolError(Exception):
    """The other side broke the protocol; the stream can't be used any further."""


def frame(payload: bytes) -> bytes:
    """Return ``payload`` as one frame.

    Raises: ProtocolError if it is over the limit or holds a newline.
    """
    if len(payload) >= FRAME_LIMIT_BYTES:
        raise ProtocolError(f"frame of {len(payload)} bytes is over the limit of {FRAME_LIMIT_BYTES}")
    if b"\n" in payload:
        raise ProtocolError("a frame must not hold a newline")
    return payload + b"\n"


class FrameReader:
    """Cuts a byte stream into frames; any split of the bytes gives the same frames.

    Never holds more than the limit plus the chunk it was given.
    """

    def __init__(self, limit_bytes: int = FRAME_LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._pending = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the frames that ``data`` completes, empty lines left out.

        Raises: ProtocolError if a frame is over the limit.
        """
        lines = data.split(b"\n")
        frames = []
        for line in lines[:-1]:
            self._extend(line)
            if self._pending:
                frames.append(bytes(self._pending))
                self._pending.clear()
        self._extend(lines[-1])
        return frames

    def end(self) -> None:
        """Say that the stream ended.

        Raises: ProtocolError if it ended inside a frame.
        """
        if self._pending:
            raise ProtocolError(f"the stream ended {len(self._pending)} bytes into a frame")

    def _extend(self, part: bytes) -> None:
        if len(self._pending) + len(part) >= self._limit_bytes:
            raise ProtocolError(f"frame over the limit of {self._limit_bytes} bytes")
        self._pending += part


def sync_mark(token: str) -> bytes:
    """Return the line that a bridge writes before anything else."""
    return f"\nGLOWPLUG-SYNC {token} {PROTOCOL_MIN} {PROTOCOL_MAX}\n".encode("ascii")


class SyncScanner:
    """Finds the sync mark in whatever a login shell printed before it.

    ``noise`` holds up to 4 KiB of what came first, for the error message.
    """

    def __init__(self, token: str, limit_bytes: int = NOISE_LIMIT_BYTES) -> None:
        self._start = f"\nGLOWPLUG-SYNC {token} ".encode("ascii")
        self._limit_bytes = limit_bytes
        self._seen = bytearray(b"\n")
        self._dropped_bytes = 0
        self.noise = b""

    def feed(self, data: bytes) -> tuple[int, int, bytes] | None:
        """Return ``(protocol_min, protocol_max, rest)`` once the mark is there, else None.

        Raises: ProtocolError after too much noise, or for a mark that can't be read.
        """
        self.noise = (self.noise + data)[:4096] if len(self.noise) < 4096 else self.noise
        self._seen += data
        at = self._seen.find(self._start)
        if at < 0:
            self._drop_noise()
            return None
        end = self._seen.find(b"\n", at + 1)
        if end < 0:
            if len(self._seen) - at > len(self._start) + 32:
                raise ProtocolError("the agent's first line can't be read")
            return None
        words = bytes(self._seen[at + len(self._start) : end]).split()
        if len(words) != 2 or not all(word.isdigit() and len(word) < 6 for word in words):
            raise ProtocolError("the agent's first line can't be read")
        return int(words[0]), int(words[1]), bytes(self._seen[end + 1 :])

    def _drop_noise(self) -> None:
        spare = len(self._seen) - len(self._start)
        if spare > 0:
            del self._seen[:spare]
            self._dropped_bytes += spare
        if self._dropped_bytes > self._limit_bytes:
            raise ProtocolError(f"no agent answered within the first {self._limit_bytes} bytes")
