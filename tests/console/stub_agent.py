"""A process that speaks the agent's protocol over stdio, well or as badly as its script says.

``python stub_agent.py [--script NAME] [--heartbeat S] [--log FILE] bridge --mark TOKEN``. It builds
every byte itself, so that it can say what the real agent's own types would refuse to.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

JOURNAL = "3f0e9c52-journal"

HOSTILE = {
    "clear screen": "a\x1b[2Jb",
    "clipboard": "a\x1b]52;c;cm0gLXJmIC8=\x07b",
    "title": "a\x1b]0;owned\x1b\\b",
    "hyperlink": "\x1b]8;;http://evil.example\x1b\\click\x1b]8;;\x1b\\",
    "device control": "a\x1bPq#0;2;0;0;0\x1b\\b",
    "unfinished string": "a\x1b]52;c;QUJD",
    "eight bit": "a\x9b31mb\x9d0;t\x9cc\x90q\x9c",
    "bidi": "user\u202etxt.exe\u202c\u2066x\u2069",
    "zero width": "ad\u200bmin\ufeff\u2060",
    "separators": "one\u2028two\u2029three\x85four",
    "line breaks": "50%\r100%\nERROR all fine",
    "backspace": "no\x08\x08yes",
    "nul and del": "a\0b\x7fc",
    "surrogate": "a\ud800b",
    "markup": "[/nope][red]not red[/red][@click=app.quit]x[/]",
    "marks": "z" + "\u0301\u0336" * 40,
    "tags": "x\U000e0041\U000e007f",
    "long": "y" * 20000,
}


def frame(message: dict[str, object]) -> bytes:
    return json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n"


def event(seq: int, kind: str, data: object, run_uid: str | None = None) -> bytes:
    params = {"seq": seq, "run_uid": run_uid, "t_mono_ns": seq, "t_wall_ns": seq, "kind": kind, "data": data}
    return frame({"method": "event", "params": params})


def finding(seq: int, text: str) -> bytes:
    return event(seq, "finding", {"code": "stub", "severity": "info", "text": text})


def nested(depth: int) -> bytes:
    data = b"[" * depth + b'"\\u001b[2J"' + b"]" * depth
    return event(1, "new.kind", "DATA").replace(b'"DATA"', data)


class Stub:
    def __init__(self, script: str, heartbeat_s: float, log: Path | None) -> None:
        self.script, self.heartbeat_s, self.log = script, heartbeat_s, log
        self.lock = threading.Lock()

    def send(self, data: bytes) -> None:
        with self.lock:
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()

    def run(self, token: str) -> int:
        if self.script == "no agent":
            self.send(b"python3: can't open file 'agent.pyz'\n")
            return 3
        if self.script == "never a mark":
            sys.stdin.buffer.read()
            return 0
        if self.script == "endless noise":
            while True:
                self.send(b"motd motd motd\n" * 4096)
        if self.script == "noisy":
            self.send(b'\x1b[33m! Only /data is persistent\x1b[0m\n{"jsonrpc":"2.0","id":1,"result":{}}\n')
            self.send(b"GLOWPLUG-SYNC 0000 1 1\n+ eval set -x\nno line end")
        versions = b"7 9" if self.script == "future mark" else b"1 1"
        self.send(b"\nGLOWPLUG-SYNC " + token.encode() + b" " + versions + b"\n")
        if self.script not in ("silent", "mute"):
            threading.Thread(target=self.beat, daemon=True).start()
        for line in sys.stdin.buffer:
            if self.script == "silent" and b'"subscribe"' not in line and b'"hello"' not in line:
                continue
            self.answer(json.loads(line))
        return 0

    def beat(self) -> None:
        while True:
            time.sleep(self.heartbeat_s)
            self.send(self.heartbeat())

    def heartbeat(self) -> bytes:
        return frame({"method": "heartbeat", "params": {"t_mono_ns": time.monotonic_ns(), "newest_seq": 0}})

    def answer(self, request: dict[str, object]) -> None:
        if self.log is not None:
            with self.log.open("a") as file:
                file.write(json.dumps(request) + "\n")
        method, ident = request["method"], request["id"]
        if method == "hello":
            beat = self.heartbeat() if self.script == "beat with hello" else b""
            self.send(frame({"id": ident, "result": self.hello()}) + beat)
        elif method == "subscribe":
            self.send(frame({"id": ident, "result": {"next_seq": 1}}))
            self.play()
        elif method == "ack":
            self.send(frame({"id": ident, "result": {}}))
        elif method == "probe":
            self.send(frame({"id": ident, "result": self.probe()}))
        elif method == "run.cancel":
            body = {"code": -32000, "message": HOSTILE["clear screen"], "data": {"code": "no_such_run"}}
            self.send(frame({"id": ident, "error": body}))
        elif method != "status":  # status is never answered
            self.send(frame({"id": ident, "error": {"code": -32601, "message": "no such method"}}))

    def hello(self) -> dict[str, object]:
        hostname = "".join(HOSTILE.values()) if self.script == "hostile" else "stub"
        return {
            "protocol": 9 if self.script == "future hello" else 1, "agent_version": "0", "journal_uuid": JOURNAL,
            "boot_id": "b", "oldest_seq": 1, "newest_seq": 9, "hostname": hostname, "user": "u", "pid": 1,
            "python": "3", "heartbeat_s": self.heartbeat_s, "t_mono_ns": 0, "t_wall_ns": 0,
        }  # fmt: skip

    def probe(self) -> dict[str, object]:
        return {
            "hostname": HOSTILE["title"], "kernel": "k", "cpu_count": 1, "memory_total_bytes": 1,
            "memory_available_bytes": 1, "sampler": "absent",
        }  # fmt: skip

    def play(self) -> None:
        plays: dict[str, Callable[[], None]] = {
            "hostile": self.play_hostile,
            "long line": lambda: self.send(b'{"jsonrpc":"2.0","method":"' + b"x" * 5_000_000 + b'"}\n'),
            "half line": self.play_half_line,
            "invalid utf-8": lambda: self.send(b'\xff\xfe{"jsonrpc":"2.0"}\n'),
            "nul": lambda: self.send(b"\0\0\0\n"),
            "deep": lambda: self.send(nested(100_000)),
            "nested": lambda: self.send(nested(200)),
            "not a number": lambda: self.send(event(1, "new.kind", float("nan"))),
            "gap": lambda: self.send(
                frame({"method": "gap", "params": {"from_seq": 1, "to_seq": 7}}) + finding(8, "after the gap")
            ),
            "duplicates": lambda: self.send(b"".join(finding(seq, str(seq)) for seq in (1, 2, 2, 1, 3))),
            "unknown kind": lambda: self.send(event(1, "new.kind", {"a\x1b[2J": ["\x1b[2J", 1.5, None, True]})),
            "unreadable": lambda: self.send(event(1, "run.stage", {"stage": "\x1b[2J"}) + finding(2, "after it")),
            "unknown notification": lambda: self.send(frame({"method": "shutdown-now", "params": {}})),
            "asks": lambda: self.send(frame({"id": 1, "method": "hello", "params": {"client": "x"}})),
            "unasked answer": lambda: self.send(frame({"id": 4711, "result": {}})),
            "flood": lambda: self.send(b"".join(finding(seq, "z" * 200) for seq in range(1, 20_001))),
        }  # fmt: skip
        play = plays.get(self.script)
        if play is not None:
            play()

    def play_hostile(self) -> None:
        self.send(b"".join(finding(seq, text) for seq, text in enumerate(HOSTILE.values(), 1)))

    def play_half_line(self) -> None:
        self.send(finding(1, "whole") + finding(2, "half")[:-20])
        sys.stdout.close()
        sys.exit(0)


def main(argv: list[str]) -> int:
    before, after = argv[: argv.index("bridge")], argv[argv.index("bridge") + 1 :]
    options = dict(zip(before[::2], before[1::2], strict=True))
    bridge = dict(zip(after[::2], after[1::2], strict=True))
    log = options.get("--log")
    stub = Stub(options.get("--script", ""), float(options.get("--heartbeat", "5")), Path(log) if log else None)
    return stub.run(bridge["--mark"])


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except BrokenPipeError:
        sys.exit(1)
