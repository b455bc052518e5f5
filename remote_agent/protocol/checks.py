"""Rules that several of the protocol's types keep."""

from __future__ import annotations

import re
from collections.abc import Iterator


def outside(name: str, value: int, most: int) -> Iterator[str]:
    if not 1 <= value <= most:
        yield f"{name}: {value} is not within 1..{most}"


def not_whole(name: str, path: str | None) -> Iterator[str]:
    if path is not None and (not path.startswith(("/", "~/")) or "\0" in path):
        yield f"{name}: {path[:80]!r} must be a whole path on the host, or begin with ~/"


def address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def not_url_path(name: str, path: str) -> Iterator[str]:
    if not re.fullmatch(r"/[!-~]*", path):
        yield f"{name}: {path[:80]!r} is no path of a URL: it begins with /, without blanks"
