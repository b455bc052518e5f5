"""Reads the guide as its reader does: files to write, commands to type, and what they are said to show."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.end_to_end.hosts import REPOSITORY

PAGE = REPOSITORY / "docs" / "guide.md"

_BLOCK = re.compile(r"^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
_FILE = re.compile(r"(?P<added>Add to )?`(?P<path>/[^`\s]+)`:\n\n\Z")
_VARIES = (
    (re.compile(r"\b[A-Z][a-z]{2} \d\d \d\d:\d\d:\d\d\b"), "DATE"),
    (re.compile(r"\b[\w.-]+:\d+:[0-9a-f]{8}\b"), "HOLDER"),
    (re.compile(r"\b[\w.-]+@[\w.-]+"), "WHO"),
    (re.compile(r"\b[0-9a-f]{8}\b"), "UID"),
    (re.compile(r"\b\d+(\.\d+)? ?(ns|µs|ms|s|min|h)\b"), "TIME"),
    (re.compile(r"\b(cold|cached)(?= →)"), "FILES"),  # the kernel may have let go of a file's pages
    (re.compile(r"\s+"), " "),
)
"""What differs from one time to the next; in a page's lines it stands as it once was."""


@dataclass(frozen=True)
class Block:
    """One block of code. ``path``: the file that it is, or what is ``added`` to it."""

    language: str
    text: str
    path: str | None = None
    added: bool = False


class Guide:
    """The page's steps by number. ``here``: what its places are called in a test."""

    def __init__(self, here: Mapping[str, str]) -> None:
        page = PAGE.read_text(encoding="utf-8")
        for there in sorted(here, key=len, reverse=True):
            assert there in page, f"{PAGE.name} does not name {there}"
            page = page.replace(there, here[there])
        parts = re.split(r"^## (\d+)\. .*$", page, flags=re.MULTILINE)
        self._steps = {int(number): tuple(_blocks(text)) for number, text in zip(parts[1::2], parts[2::2], strict=True)}

    def write_files(self, step: int) -> list[Path]:
        """Write each file that a step shows, or add to it what it is to have besides; return where they are."""
        files = [block for block in self._steps[step] if block.path is not None]
        for block in files:
            path = Path(block.path or "")
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a" if block.added else "w", encoding="utf-8") as file:
                file.write(f"\n{block.text}" if block.added else block.text)
        return [Path(block.path or "") for block in files]

    def commands(self, step: int) -> list[str]:
        """Return a step's blocks of commands."""
        return [one.text for one in self._steps[step] if one.language == "sh" and one.path is None]

    def outputs(self, step: int) -> list[tuple[str, ...]]:
        """Return, for each block of output that a step shows, its lines; ``…`` stands for any."""
        shown = [one.text for one in self._steps[step] if one.language == "text"]
        return [tuple(line for line in text.splitlines() if line.strip(" …")) for text in shown]


def missing(shown: tuple[str, ...], said: str) -> list[str]:
    """Return which of the lines shown nothing that was said is like, but for times, names and numbers of the day."""
    assert shown
    there = {_steady(line) for line in said.splitlines()}
    return [line for line in shown if _steady(line) not in there]


def _blocks(text: str) -> Iterator[Block]:
    for match in _BLOCK.finditer(text):
        file = _FILE.search(text[: match.start()])
        if file is None:
            yield Block(match["language"], match["text"])
        else:
            yield Block(match["language"], match["text"], file["path"], file["added"] is not None)


def _steady(line: str) -> str:
    for pattern, name in _VARIES:
        line = pattern.sub(name, line)
    return line.strip()
