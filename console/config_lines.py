"""Where a mistake is and what may have been meant: the line of every key in a TOML text, and names that are close.

Written for text that `tomllib` has already accepted, so it never has to judge syntax.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence

import tomllib

_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_SPACE = re.compile(r"[ \t]*")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_STRING = re.compile(
    r'"""(?:[^\\]|\\.)*?"{3,5}|' + r"'''.*?'{3,5}|" + r'"(?:[^"\\\n]|\\.)*"|' + r"'[^'\n]*'", re.DOTALL
)
_SCALAR = re.compile(r"[^,\]}#\n]*")


def key_lines(text: str) -> dict[str, int]:
    """Return the line (from 1) of every key and array item, by the path that `codec.decode` gives it."""
    return _Scanner(text).scan()


def line_of(lines: dict[str, int], path: str) -> int:
    """Return the line of ``path``, or of the nearest table around it; 1 where there is none."""
    while path not in lines:
        shorter = re.sub(r"(\.[^.\[]*|\[\d+\])$", "", path)
        if shorter == path:
            return 1
        path = shorter
    return lines[path]


def hint(wrong: str, candidates: Sequence[str]) -> str:
    """Return ``; did you mean X?`` with what of ``candidates`` is close to ``wrong``; empty where nothing is."""
    by_lower = {candidate.lower(): candidate for candidate in candidates}
    close = [by_lower[lower] for lower in difflib.get_close_matches(wrong.lower(), by_lower, 3, 0.6)]
    return f"; did you mean {' or '.join(close)}?" if close else ""


class _Scanner:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._lines: dict[str, int] = {}
        self._items: dict[str, int] = {}
        self._line, self._counted = 1, 0

    def scan(self) -> dict[str, int]:
        table = ""
        while self._skip(_BLANK) < len(self._text):
            if self._text[self._at] == "[":
                table = self._header()
            else:
                self._pair(table)
        return self._lines

    def _skip(self, pattern: re.Pattern[str]) -> int:
        match = pattern.match(self._text, self._at)
        self._at = match.end() if match else self._at
        return self._at

    def _note(self, path: str, at: int) -> None:
        self._line += self._text.count("\n", self._counted, at)
        self._counted = at
        self._lines.setdefault(path, self._line)

    def _header(self) -> str:
        start = self._at
        brackets = 2 if self._text.startswith("[[", self._at) else 1
        self._at += brackets
        path = self._key("", start)
        if brackets == 2:
            index = self._items.get(path, 0)
            self._items[path] = index + 1
            path = f"{path}[{index}]"
            self._note(path, start)
        self._at += brackets
        return path

    def _pair(self, table: str) -> None:
        path = self._key(table, self._at)
        self._at += 1  # the equals sign
        self._skip(_SPACE)
        self._value(path)

    def _key(self, path: str, start: int) -> str:
        """Read a dotted key below ``path`` and the space behind it; every part of it is noted."""
        while True:
            self._skip(_SPACE)
            part_start = self._at
            quoted = self._text[self._at] in "\"'"
            self._skip(_STRING if quoted else _BARE_KEY)
            part = self._text[part_start : self._at]
            name = tomllib.loads(f"k = {part}")["k"] if quoted else part
            if path in self._items:
                path = f"{path}[{self._items[path] - 1}]"
            path = f"{path}.{name}" if path else name
            self._note(path, start)
            self._skip(_SPACE)
            if not self._text.startswith(".", self._at):
                return path
            self._at += 1

    def _value(self, path: str) -> None:
        first = self._text[self._at : self._at + 1]
        if first in ('"', "'"):
            self._skip(_STRING)
        elif first == "[":
            self._collection("]", lambda index: self._item(f"{path}[{index}]"))
        elif first == "{":
            self._collection("}", lambda _: self._pair(path))
        else:
            self._skip(_SCALAR)

    def _item(self, path: str) -> None:
        self._note(path, self._at)
        self._value(path)

    def _collection(self, end: str, read: Callable[[int], None]) -> None:
        self._at += 1
        index = 0
        while self._skip(_BLANK) < len(self._text) and self._text[self._at] != end:
            if self._text[self._at] == ",":
                self._at += 1
                continue
            read(index)
            index += 1
        self._at += 1
