"""The codec: what is encoded comes back, what does not fit is named, all of it at once."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Union

import hypothesis.strategies as st
import pytest
from hypothesis import given

from remote_agent.protocol.codec import INT_MAX, INT_MIN, DecodeError, Problem, Unknown, decode, encode
from remote_agent.protocol.internal import ShardIdentity, WorkerGo, WorkerStage, dump, parse
from remote_agent.protocol.messages import (
    Actor,
    Failure,
    ModelSource,
    Recipe,
    RunRecord,
    RunState,
    Shape,
    StageRecord,
    StageStatus,
    Tier,
)

texts = st.text(max_size=20)
integers = st.integers(INT_MIN, INT_MAX)
floats = st.floats(allow_nan=False, allow_infinity=False, min_value=-1e300, max_value=1e300)
figures = st.dictionaries(texts, st.one_of(st.none(), st.booleans(), integers, texts), max_size=4)


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Inner:
    number: int
    ratio: float = 0.5

    def __post_init__(self) -> None:
        if self.number == 13:
            raise ValueError("number: is not allowed to be 13")


@dataclass(frozen=True)
class Outer:
    name: str
    inner: Inner
    colour: Colour
    mode: Literal["on", "off"]
    items: tuple[Inner, ...] = ()
    table: Mapping[str, int] = field(default_factory=dict)
    maybe: Union[int, None] = None
    flag: bool = False
    anything: object = None


inners = st.builds(Inner, integers.filter(lambda number: number != 13), floats)
outers = st.builds(
    Outer,
    texts,
    inners,
    st.sampled_from(Colour),
    st.sampled_from(["on", "off"]),
    st.lists(inners, max_size=3).map(tuple),
    st.dictionaries(texts, integers, max_size=3),
    st.one_of(st.none(), integers),
    st.booleans(),
    st.one_of(st.none(), texts, st.lists(integers, max_size=2)),
)
stages = st.builds(
    StageRecord,
    texts,
    st.sampled_from(StageStatus),
    st.one_of(st.none(), integers),
    bytes=st.one_of(st.none(), integers),
    rate_bytes_s=st.one_of(st.none(), floats),
    extra=figures,
)
runs = st.builds(
    RunRecord,
    texts,
    texts,
    texts,
    texts,
    st.builds(Actor, texts, texts),
    st.sampled_from(RunState),
    st.sampled_from(Tier),
    st.one_of(st.none(), st.sampled_from(Tier)),
    integers,
    st.lists(texts, max_size=2).map(tuple),
    stages=st.lists(stages, max_size=3).map(tuple),
    failure=st.one_of(st.none(), st.builds(Failure, texts, texts, log_tail=st.lists(texts, max_size=2).map(tuple))),
)
json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), integers, floats, texts),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=8,
)


@given(outers)
def test_every_supported_shape_comes_back_through_json(value: Outer) -> None:
    """Encoding, JSON and decoding is the identity."""
    assert decode(Outer, json.loads(json.dumps(encode(value)))) == value


@given(runs)
def test_a_run_comes_back_through_json(run: RunRecord) -> None:
    """The largest type of the wire loses nothing."""
    assert decode(RunRecord, json.loads(json.dumps(encode(run)))) == run


@given(json_values)
def test_any_json_is_decoded_or_refused(value: object) -> None:
    """No value makes the codec raise anything but its own error, with at least one problem."""
    for cls in (Outer, Recipe, RunRecord):
        result, problems = attempt(cls, value)
        assert isinstance(result, cls) or problems


def attempt(cls: type, value: object) -> tuple[object, tuple[Problem, ...]]:
    """Return what decoding gives: a result or its problems."""
    try:
        return decode(cls, value), ()
    except DecodeError as error:
        return None, error.problems


def test_every_problem_is_reported_with_its_place() -> None:
    """One refusal names all misfits by their path."""
    bad = {
        "name": 1,
        "inner": {"number": True},
        "colour": "green",
        "mode": "on",
        "items": [{"number": 1}, {"ratio": "x"}],
        "table": {"a": "b"},
    }
    with pytest.raises(DecodeError) as refused:
        decode(Outer, bad)

    assert {problem.path for problem in refused.value.problems} == {
        "name",
        "inner.number",
        "colour",
        "items[1].number",
        "items[1].ratio",
        "table.a",
    }


def test_unknown_keys_are_ignored_on_the_wire_and_refused_in_files() -> None:
    """A newer peer may say more; a person's typo is found."""
    value = {"path": "/m", "pth": "/n"}

    assert decode(ModelSource, value) == ModelSource("/m")
    with pytest.raises(DecodeError, match="pth: unknown key"):
        decode(ModelSource, value, Unknown.REFUSE)


def test_a_refused_combination_is_filed_under_its_field() -> None:
    """What a type's own check says stands at the field it names."""
    with pytest.raises(DecodeError) as refused:
        decode(Outer, {"name": "x", "inner": {"number": 13}, "colour": "red", "mode": "on"})

    assert [str(problem) for problem in refused.value.problems] == ["inner.number: is not allowed to be 13"]


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 1.0, True, "1", None, [1]])
def test_an_integer_is_an_integer_of_64_bits(value: object) -> None:
    """Booleans, floats, text and what a database can't hold are refused."""
    with pytest.raises(DecodeError):
        decode(Shape, {"batch": value})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 10**400, "1", True])
def test_a_number_is_finite(value: object) -> None:
    """Neither NaN nor infinity gets in, not even as a huge integer."""
    with pytest.raises(DecodeError):
        decode(Inner, {"number": 1, "ratio": value})


shards = st.builds(ShardIdentity, texts, integers, integers, integers, integers, integers)
internal = st.one_of(
    st.builds(WorkerGo, st.lists(shards, max_size=3).map(tuple)),
    st.builds(WorkerStage, texts, st.sampled_from(StageStatus), integers, extra=figures),
)


@given(internal)
def test_internal_messages_come_back_from_their_frames(message: WorkerGo | WorkerStage) -> None:
    """What agentd and its children tell each other survives the socket."""
    assert parse(dump(message).rstrip(b"\n")) == message
