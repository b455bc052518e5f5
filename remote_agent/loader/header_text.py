"""Reads the JSON of a safetensors header, entry by entry, in memory bounded by the header's own size.

Only the format's grammar is read: one object of tensor entries and at most one
``__metadata__``. Nothing nests, so hostile nesting, huge numbers and NaN cost nothing.
Format: https://huggingface.co/docs/safetensors (section "Format").
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from remote_agent.loader.problems import shown

ENTRY_LIMIT_CHARACTERS = 1 << 16
"""One tensor's entry is some hundred characters; nothing longer is read."""

INT_MAX = 2**63 - 1
METADATA = "__metadata__"

_SURROGATE = re.compile("[\ud800-\udfff]")
SPACES = " \t\r\n"
_SPACE = re.compile(rf"[{SPACES}]*")
_NUMBER = r"(?:0|[1-9][0-9]{0,18})"
_WS = r"[ \t\r\n]*"
_USUAL_ENTRY = re.compile(
    rf'\{{{_WS}"dtype"{_WS}:{_WS}"([A-Z0-9_]+)"{_WS},{_WS}"shape"{_WS}:{_WS}'
    rf"\[{_WS}((?:{_NUMBER}(?:{_WS},{_WS}{_NUMBER})*)?){_WS}\]{_WS},{_WS}"
    rf'"data_offsets"{_WS}:{_WS}\[{_WS}({_NUMBER}){_WS},{_WS}({_NUMBER}){_WS}\]{_WS}\}}'
)


class HeaderTextError(ValueError):
    """The text is no safetensors header; ``code`` and ``tensor`` as in `CheckpointProblem`."""

    def __init__(self, code: str, detail: str, tensor: str | None = None) -> None:
        super().__init__(detail)
        self.code = code
        self.tensor = tensor


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor; ``start`` and ``end`` are byte offsets from the start of the data section.

    The parser checks only that the numbers are within 0..2**63-1 and that ``start <= end``.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


def parse_header_text(content: bytes) -> tuple[list[TensorEntry], dict[str, str]]:
    """Return the entries in the order of the text, and the metadata.

    Raises: HeaderTextError for anything that is not the format's grammar.
    """
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise HeaderTextError("bad_header", f"header is not UTF-8: byte {error.start} of it") from error
    entries: list[TensorEntry] = []
    names: set[str] = set()
    metadata: dict[str, str] | None = None
    reader = _Reader(text)
    for name in reader.members("the header"):
        if name == METADATA:
            if metadata is not None:
                raise HeaderTextError("duplicate_name", f"{METADATA} stands twice in the header")
            metadata = reader.metadata()
            continue
        if name in names:
            raise HeaderTextError("duplicate_name", f"tensor {shown(name)} stands twice in the header", name)
        names.add(name)
        entries.append(reader.entry(name))
    reader.end()
    return entries, metadata or {}


class _Reader:
    """A position in the text; each method reads one thing and moves behind it."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._strings = json.JSONDecoder()
        self._entries = json.JSONDecoder(
            object_pairs_hook=_unique, parse_constant=_refuse_number, parse_float=_refuse_number
        )

    def members(self, what: str) -> Iterator[str]:
        """Yield the name of each member of an object; the caller reads its value before it asks on."""
        self._expect("{", what)
        if self._peek() == "}":
            self._at += 1
            return
        while True:
            name = self._string(f"a name in {what}")
            self._expect(":", what, after=name)
            self._peek()
            yield name
            if self._peek() == "}":
                self._at += 1
                return
            self._expect(",", what)

    def metadata(self) -> dict[str, str]:
        """Read text by name, or null."""
        if self._text.startswith("null", self._at):
            self._at += 4
            return {}
        if self._peek() != "{":
            raise HeaderTextError("bad_metadata", f"{METADATA} is {self._kind()}, not an object of texts")
        found: dict[str, str] = {}
        for key in self.members(METADATA):
            if self._peek() != '"':
                detail = f"{METADATA}.{shown(key)} is {self._kind()}; metadata must be text"
                raise HeaderTextError("bad_metadata", detail)
            found[key] = self._string(f"{METADATA}.{shown(key)}")
        return found

    def entry(self, name: str) -> TensorEntry:
        """Read one tensor's dtype, shape and offsets."""
        usual = _USUAL_ENTRY.match(self._text, self._at)
        if usual is None:
            return self._unusual_entry(name)
        self._at = usual.end()
        dtype, dimensions, start, end = usual.groups()
        shape = tuple(int(number) for number in dimensions.split(",")) if dimensions else ()
        return _checked(name, dtype, shape, (int(start), int(end)))

    def end(self) -> None:
        """Require that only padding is left."""
        if self._peek():
            found = shown(self._text[self._at : self._at + 20])
            raise HeaderTextError("bad_header", f"header goes on after its end with {found!r}")

    def _unusual_entry(self, name: str) -> TensorEntry:
        error: ValueError | RecursionError | None = None
        for limit in (1024, ENTRY_LIMIT_CHARACTERS):
            try:
                value, length = self._entries.raw_decode(self._text[self._at : self._at + limit])
            except (ValueError, RecursionError) as problem:
                error = problem
                continue
            self._at += length
            return _from_mapping(name, value)
        text = str(error) if isinstance(error, ValueError) else "nested too deep"
        raise HeaderTextError("bad_header", f"tensor {shown(name)}: entry can't be read: {shown(text)}", name)

    def _string(self, what: str) -> str:
        if self._peek() != '"':
            raise HeaderTextError("bad_header", f"{what} is {self._kind()} at character {self._at}")
        try:
            value, self._at = self._strings.raw_decode(self._text, self._at)
        except ValueError as error:
            raise HeaderTextError("bad_header", f"{what} can't be read: {shown(str(error))}") from error
        if not isinstance(value, str) or _SURROGATE.search(value):
            raise HeaderTextError("bad_header", f"{what} holds half a surrogate pair")
        return value

    def _expect(self, character: str, what: str, after: str | None = None) -> None:
        found = self._peek()
        if found != character:
            what += "" if after is None else f", after {shown(after)!r}"
            seen = repr(shown(found)) if found else "its end"
            raise HeaderTextError(
                "bad_header", f"{what} is not JSON: {character!r} expected at character {self._at}, found {seen}"
            )
        self._at += 1

    def _peek(self) -> str:
        """Move to the next character that is no space, and return it."""
        found = self._text[self._at : self._at + 1]
        if found in SPACES:  # seldom: nobody writes headers for people
            match = _SPACE.match(self._text, self._at)
            assert match is not None  # the pattern matches nothing as well
            self._at = match.end()
            found = self._text[self._at : self._at + 1]
        return found

    def _kind(self) -> str:
        character = self._peek()
        kinds = {"{": "an object", "[": "a list", '"': "text", "t": "true", "f": "false", "n": "null", "": "missing"}
        is_number = character == "-" or character.isdigit()
        return kinds.get(character, "a number" if is_number else "not JSON")


def _from_mapping(name: str, value: object) -> TensorEntry:
    if not isinstance(value, Mapping):
        raise HeaderTextError("bad_header", f"tensor {shown(name)}: entry is not an object", name)
    missing = [key for key in ("dtype", "shape", "data_offsets") if key not in value]
    if missing:
        raise HeaderTextError("bad_header", f"tensor {shown(name)}: entry has no {', '.join(missing)}", name)
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str):
        raise HeaderTextError("unknown_dtype", f"tensor {shown(name)}: dtype is not text", name)
    if not _are_integers(shape):
        raise HeaderTextError("bad_shape", f"tensor {shown(name)}: shape is not a list of integers", name)
    if not _are_integers(offsets) or len(offsets) != 2:
        raise HeaderTextError("bad_offsets", f"tensor {shown(name)}: data_offsets are not two integers", name)
    return _checked(name, dtype, tuple(shape), (offsets[0], offsets[1]))


def _checked(name: str, dtype: str, shape: tuple[int, ...], offsets: tuple[int, int]) -> TensorEntry:
    wrong = next((number for number in shape if not 0 <= number <= INT_MAX), None)
    if wrong is not None:
        detail = f"tensor {shown(name)}: dimension {shown(str(wrong), 24)} is not within 0..{INT_MAX}"
        raise HeaderTextError("bad_shape", detail, name)
    start, end = offsets
    if not 0 <= start <= end <= INT_MAX:
        detail = f"tensor {shown(name)}: offsets {shown(str(start), 24)}..{shown(str(end), 24)} are not a range"
        raise HeaderTextError("bad_offsets", detail, name)
    return TensorEntry(name, dtype, shape, start, end)


def _are_integers(value: object) -> bool:
    return isinstance(value, list) and all(type(number) is int for number in value)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands twice")
    return found


def _refuse_number(text: str) -> object:
    raise ValueError(f"{shown(text, 24)} is not an integer")
