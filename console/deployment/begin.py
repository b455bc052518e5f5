"""Runs on the host, by ``python -c``: sees that the agent's file is what was sent, and becomes its verb ``install``.

The request is one line of JSON on standard input, so no shell reads any of it; the file's bytes may follow.
"""

import hashlib
import json
import os
import sys
from pathlib import Path


def say(token: str, message: dict[str, str]) -> None:
    sys.stdout.write(f"\n{token} {json.dumps(message)}\n")
    sys.stdout.flush()


def receive(path: str, size: int) -> None:
    """Write what comes on standard input; a file that is not whole does not stay."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(path, "xb") as file:
            left = size
            while left and (data := sys.stdin.buffer.read(min(left, 1 << 16))):
                left -= file.write(data)
        if left:
            raise OSError(0, f"{size - left} of {size} bytes came", path)
    except OSError:
        remove(path)
        raise


def remove(path: str) -> None:
    try:
        Path(path).unlink()
    except OSError:
        pass


def main(token: str) -> None:
    say(token, {"step": "ready"})
    request = json.loads(sys.stdin.buffer.readline())
    path = request["path"]
    try:
        if request["size_bytes"]:
            receive(path, request["size_bytes"])
        found = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError as error:
        say(token, {"error": f"{error.filename or path}: {error.strerror}"})
        return
    if request["sha256"] not in (None, found):
        remove(path)
        say(token, {"error": f"{path}: its SHA-256 is {found}, sent was {request['sha256']}"})
        return
    os.execv(sys.executable, [sys.executable, path, *request["arguments"]])


if __name__ == "__main__":
    main(sys.argv[1])
