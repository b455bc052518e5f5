"""Turns JSON-like values into frozen dataclasses and back, reporting every problem at once.

One structural check serves the wire, recipes and the console's configuration.
Supported annotations: ``str int float bool None``, ``Literal``, ``Enum``,
``tuple[T, ...]``, ``Mapping[str, T]``, dataclasses, unions with ``None``, and
``object`` for a value that is passed through as it is.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
import typing
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any, Literal, TypeVar

T = TypeVar("T")

INT_MIN, INT_MAX = -(2**63), 2**63 - 1


@dataclasses.dataclass(frozen=True)
class Problem:
    """One thing wrong with a value: where (``recipes.llama.request.batch``) and what."""

    path: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}: {self.text}" if self.path else self.text


class DecodeError(ValueError):
    """A value does not fit its type; ``problems`` names every misfit."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__("; ".join(str(problem) for problem in problems))
        self.problems = problems


class Checked:
    """A dataclass whose values are refused together: one ``ValueError`` says all that `value_problems` yields.

    While a field does not even have its type, the others are looked at all the same: what yields about a field
    without a default comes last, since such a field may be missing then.
    """

    def value_problems(self) -> Iterator[str]:
        """Yield ``"field: text"`` for each value that is out of its range."""
        raise NotImplementedError

    def __post_init__(self) -> None:
        texts = tuple(self.value_problems())
        if texts:
            raise ValuesError(texts)


class ValuesError(ValueError):
    """Values that their dataclass refuses; ``texts`` has one ``"field: text"`` for each."""

    def __init__(self, texts: tuple[str, ...]) -> None:
        super().__init__("; ".join(texts))
        self.texts = texts


class Unknown(enum.Enum):
    """What to do with keys that a type does not have."""

    REFUSE = "refuse"
    IGNORE = "ignore"


def decode(cls: type[T], value: object, unknown: Unknown = Unknown.IGNORE, path: str = "") -> T:
    """Return ``value`` as a ``cls``, or say everything that is wrong with it.

    A dataclass may raise ``ValueError`` in ``__post_init__``, or be `Checked`, to refuse
    values; a message of the form ``"field: text"`` is filed under that field.

    Raises: DecodeError with one problem for each misfit.
    """
    problems: list[Problem] = []
    result = _decode(cls, value, path, unknown, problems)
    if problems:
        raise DecodeError(tuple(problems))
    return typing.cast(T, result)


def encode(value: object) -> Any:
    """Return ``value`` as JSON-like data; the inverse of `decode`."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in value]
    return value


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _describe(value: object) -> str:
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "an integer", float: "a number", str: "text", list: "a list", tuple: "a list"}
    if isinstance(value, Mapping):
        return "a table"
    return names.get(type(value), type(value).__name__)


def _decode(hint: Any, value: object, path: str, unknown: Unknown, problems: list[Problem]) -> object:
    origin = typing.get_origin(hint)
    if hint is object:
        return value
    if origin in (typing.Union, types.UnionType):
        return _decode_union(hint, value, path, unknown, problems)
    if origin is Literal:
        return _decode_choice(typing.get_args(hint), value, path, problems)
    if origin is tuple:
        return _decode_tuple(hint, value, path, unknown, problems)
    if origin is not None and issubclass(origin, Mapping):
        return _decode_mapping(hint, value, path, unknown, problems)
    if dataclasses.is_dataclass(hint):
        return _decode_dataclass(typing.cast(type, hint), value, path, unknown, problems)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        choice = _decode_choice(tuple(member.value for member in hint), value, path, problems)
        return None if choice is None else hint(choice)
    return _decode_scalar(hint, value, path, problems)


def _decode_union(hint: Any, value: object, path: str, unknown: Unknown, problems: list[Problem]) -> object:
    options = [option for option in typing.get_args(hint) if option is not type(None)]
    if value is None and len(options) < len(typing.get_args(hint)):
        return None
    failures: list[Problem] = []
    for option in options:
        attempt: list[Problem] = []
        result = _decode(option, value, path, unknown, attempt)
        if not attempt:
            return result
        failures = failures or attempt
    problems.extend(failures)
    return None


def _decode_choice(choices: tuple[object, ...], value: object, path: str, problems: list[Problem]) -> object:
    for choice in choices:
        if type(choice) is type(value) and choice == value:
            return value
    allowed = ", ".join(str(choice) for choice in choices)
    shown = hex(value) if type(value) is int and not INT_MIN <= value <= INT_MAX else _describe(value)
    shown = repr(value) if isinstance(value, (str, float, bool)) or shown == "an integer" else shown
    problems.append(Problem(path, f"{shown[:80]} is not one of: {allowed}"))
    return None


def _decode_tuple(hint: Any, value: object, path: str, unknown: Unknown, problems: list[Problem]) -> object:
    if not isinstance(value, (list, tuple)):
        problems.append(Problem(path, f"expected a list, got {_describe(value)}"))
        return ()
    item = typing.get_args(hint)[0]
    return tuple(_decode(item, entry, f"{path}[{index}]", unknown, problems) for index, entry in enumerate(value))


def _decode_mapping(hint: Any, value: object, path: str, unknown: Unknown, problems: list[Problem]) -> object:
    if not isinstance(value, Mapping):
        problems.append(Problem(path, f"expected a table, got {_describe(value)}"))
        return {}
    item = typing.get_args(hint)[1]
    return {str(key): _decode(item, entry, _join(path, str(key)), unknown, problems) for key, entry in value.items()}


def _decode_dataclass(cls: type, value: object, path: str, unknown: Unknown, problems: list[Problem]) -> object:
    if isinstance(value, cls):
        return value
    if not isinstance(value, Mapping):
        problems.append(Problem(path, f"expected a table, got {_describe(value)}"))
        return None
    before = len(problems)
    hints, arguments = _hints(cls), {}
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    if unknown is Unknown.REFUSE:
        problems.extend(Problem(_join(path, str(key)), "unknown key") for key in value if key not in fields)
    for name, field in fields.items():
        if name in value:
            arguments[name] = _decode(hints[name], value[name], _join(path, name), unknown, problems)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            problems.append(Problem(_join(path, name), "is required"))
    if len(problems) > before:
        bad = {problem.path for problem in problems[before:]}
        good = {name: item for name, item in arguments.items() if not _is_within(_join(path, name), bad)}
        _file(_partial_problems(cls, good), fields, path, problems)
        return None
    try:
        return cls(**arguments)
    except ValueError as error:
        _file(error.texts if isinstance(error, ValuesError) else (str(error),), fields, path, problems)
        return None


def _is_within(path: str, bad: set[str]) -> bool:
    """Return whether a value at ``path``, or something in it, is among ``bad``."""
    return any(one == path or one.startswith((f"{path}.", f"{path}[")) for one in bad)


def _partial_problems(cls: type, good: Mapping[str, object]) -> tuple[str, ...]:
    """Return what a `Checked` refuses of its well-typed fields while others are not."""
    if not issubclass(cls, Checked):
        return ()
    partial = object.__new__(cls)
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if field.name in good:
            object.__setattr__(partial, field.name, good[field.name])
        elif field.default is not dataclasses.MISSING:
            object.__setattr__(partial, field.name, field.default)
        elif field.default_factory is not dataclasses.MISSING:
            object.__setattr__(partial, field.name, field.default_factory())
    texts: list[str] = []
    try:
        texts.extend(partial.value_problems())
    except AttributeError:
        pass  # a field without a default is missing, and said to be
    return tuple(texts)


def _file(texts: Iterable[str], fields: Container[str], path: str, problems: list[Problem]) -> None:
    """Add a problem for each text, under the field that it names where it names one."""
    for text in texts:
        name, colon, rest = text.partition(": ")
        if colon and name.split(".")[0].split("[")[0] in fields:
            problems.append(Problem(_join(path, name), rest))
        else:
            problems.append(Problem(path, text))


def _decode_scalar(hint: Any, value: object, path: str, problems: list[Problem]) -> object:
    if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        number = float(value) if abs(value) < 1e308 else float("inf")
        if number == number and number not in (float("inf"), float("-inf")):
            return number
    elif hint is int and isinstance(value, int) and not isinstance(value, bool):
        if INT_MIN <= value <= INT_MAX:
            return value
        problems.append(Problem(path, f"{hex(value)[:24]} does not fit 64 bits"))  # decimals have a limit
        return 0
    elif hint in (str, bool) and isinstance(value, hint):
        return value
    expected = {str: "text", int: "an integer", float: "a finite number", bool: "true or false"}
    got = str(value) if hint is float and isinstance(value, float) else _describe(value)
    problems.append(Problem(path, f"expected {expected.get(hint, hint)}, got {got}"))
    return None
