"""What `clean` lets through, and that nothing else does."""

from __future__ import annotations

import dataclasses
import json
import os
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from console.clean import clean, clean_lines, clean_record
from remote_agent.protocol.messages import (
    Actor,
    Event,
    Failure,
    Finding,
    ModelSource,
    Recipe,
    RunAccepted,
    Tier,
    UnknownData,
)
from tests.console.stub_agent import HOSTILE

CASES = Path(os.environ.get("GLOWPLUG_CASES", Path(__file__).parents[3] / "shared/cases"))

ANY_TEXT = st.text(st.characters(), max_size=400)
PIECES = ["\x1b", "\x1b[", "[31m", "\x1b]", "52;c;", "\x07", "\x1b\\", "\x9b", "\x9c", "m", "\n", "\u0301"]
NASTY_TEXT = st.lists(st.sampled_from([*HOSTILE.values(), *PIECES]), max_size=12).map("".join)
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | ANY_TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(ANY_TEXT, inner, max_size=4),
)


def is_safe(text: str) -> bool:
    """One line of characters that print, none of them moving, hiding or reordering others."""
    return text.isprintable() and not any(
        unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co") for character in text
    )


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_comes_out_safe(name: str) -> None:
    """No escape, control, bidi or format character is left, as text or as bytes."""
    assert is_safe(clean(HOSTILE[name]))
    assert is_safe(clean(HOSTILE[name].encode("utf-8", "surrogatepass")))


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("plain text, 40.1 GB/s", "plain text, 40.1 GB/s"),
        ("a\x1b[1;31mred\x1b[0m", "ared"),
        ("a\x1b]52;c;QUJD\x07b", "ab"),
        ("a\x1b]0;title\x1b\\b", "ab"),
        ("a\x1b]0;cut off\x1b[31mb", "ab"),
        ("a\x1b]never ends", "a"),
        ("a\x1bP+q544e\x1b\\b\x1b_x\x1b\\c\x1b^y\x1b\\d\x1bXz\x1b\\e", "abcde"),
        ("a\x9b2Jb\x9d0;t\x07c", "abc"),
        ("\x1b(B\x1b7x\x1bc", "x"),
        ("\x1b\x1b[0m[31mx", "�[31mx"),
        ("50%\r100%", "50%⏎100%"),
        ("line\r\n", "line"),
        ("a\tb\u00a0c\u3000d", "a b c d"),
        ("user\u202etxt", "user�txt"),
        ("ad\u200bm\u200din\ufeff", "admin"),
        ("⚠\ufe0f warn", "⚠ warn"),
        ("e\u0301xpe\u0301rience", "e\u0301xpe\u0301rience"),
        ("\u0301x", "�x"),
        ("z" + "\u0336" * 9, "z\u0336\u0336"),
        ("节点-01 ▄█▀", "节点-01 ▄█▀"),
        ("[red]not markup[/red] [/]", "[red]not markup[/red] [/]"),
        (b"\xff\xfeok", "��ok"),
        ("a\ud800b", "a�b"),
        ("", ""),
    ],
)
def test_each_rule_by_an_example(raw: str | bytes, shown: str) -> None:
    """Sequences go whole, invisible characters are dropped or shown as what they are."""
    assert clean(raw) == shown


def test_long_text_is_cut_with_an_ellipsis() -> None:
    """The limit counts what is shown; megabytes cost no more than their beginning."""
    assert clean("x" * 500) == "x" * 500
    assert clean("x" * 501) == "x" * 499 + "…"
    assert clean("\x1b[31m" * 200 + "x") == "x"
    assert clean(b"y" * 5_000_000, 10) == "yyyyyyyyy…"
    assert clean("\x1b]" + "z" * 5_000_000) == "…"


def test_clean_ascii_comes_back_as_the_very_same_object() -> None:
    """The common case copies nothing."""
    text = "".join(["GPU 0", " weights"])

    assert clean(text) is text


@given(st.one_of(ANY_TEXT, NASTY_TEXT), st.integers(1, 600))
def test_whatever_comes_in_is_safe_short_and_stays_as_it_is(text: str, limit: int) -> None:
    """For any text: safe, within the limit, and cleaning again changes nothing."""
    once = clean(text, limit)

    assert is_safe(once)
    assert len(once) <= limit
    assert clean(once, limit) == once


@given(st.binary(max_size=300))
def test_any_bytes_become_safe_text(data: bytes) -> None:
    """Bytes that are no UTF-8 are replaced, never raised about."""
    assert is_safe(clean(data))


def test_lines_are_cleaned_one_by_one_and_the_last_are_kept() -> None:
    """A log's end matters most; empty lines and line breaks of any kind are only separators."""
    assert clean_lines("one\r\n\r\n\x1b[31mtwo\x1b[0m\nthree\x85four\n".encode(), 3) == ("two", "three", "four")
    assert clean_lines("") == ()


def test_a_record_is_cleaned_in_every_place_and_stays_frozen() -> None:
    """Dataclasses, tuples, mappings and their keys, however deep."""
    recipe = Recipe("r", ModelSource("/models/\x1b[2Jx"), environment={"A": "b\x07"}, deadlines={"weights": 1.5})
    event = Event(1, "run", 2, 3, "run.accepted", RunAccepted(recipe, "hash", Actor("me", "here"), Tier.COLD, ("cpu",)))
    cleaned = clean_record(event)

    assert isinstance(cleaned.data, RunAccepted)
    assert cleaned.data.recipe.model.path == "/models/x"
    assert cleaned.data.recipe.environment == {"A": "b�"}
    assert cleaned.data.tier_from is Tier.COLD
    assert cleaned.data.actor is event.data.actor  # type: ignore[attr-defined]
    with pytest.raises(dataclasses.FrozenInstanceError):
        cleaned.data.recipe.name = "x"  # type: ignore[misc]


def test_cleaning_never_raises_about_what_it_leaves() -> None:
    """A path that is nothing but an escape sequence was valid when it came; cleaning it is not an error."""
    assert clean_record(ModelSource("\x1b[2J")).path == ""


def test_unknown_data_is_cleaned_to_any_depth() -> None:
    """Lists become tuples, keys are cleaned, nesting beyond reason is cut."""
    deep: object = "\x1b[2Jx"
    for _ in range(500):
        deep = [deep]
    cleaned = clean_record(UnknownData({"k\x07": [1, None, True, "a\x1b[mb"], "deep": deep}))

    assert isinstance(cleaned.raw, dict)
    assert cleaned.raw["k�"] == (1, None, True, "ab")
    assert "\x1b" not in repr(cleaned)
    assert "…" in repr(cleaned)


@given(ANY_JSON)
def test_any_record_is_safe_and_stays_as_it_is(raw: object) -> None:
    """For anything JSON can hold: every text safe, and cleaning again gives the very same object."""
    record = clean_record(Failure("code", "detail"))
    cleaned = clean_record(UnknownData(raw))

    assert record == Failure("code", "detail")
    assert clean_record(cleaned) is cleaned
    assert _all_safe(cleaned.raw)


def test_texts_whose_width_terminals_dispute_come_out_safe() -> None:
    """VS16, ZWJ, CJK, combining marks, RTL marks, tabs and control bytes from the collected cases."""
    if not CASES.is_dir():
        pytest.skip("the collected cases are not here")
    rows = (CASES / "make_E09.py").read_text(encoding="utf-8")
    texts = eval(rows[rows.index("rows = ") + len("rows = ") : rows.index("\nput(")])

    assert texts
    for text in texts.values():
        assert is_safe(clean(text))
        assert clean(json.loads(json.dumps(text))) == clean(text)


def test_findings_keep_their_identity_when_clean() -> None:
    """Nothing to clean, nothing copied."""
    finding = Finding("code", "info", "ok")

    assert clean_record(finding) is finding


def _all_safe(value: object) -> bool:
    if isinstance(value, str):
        return is_safe(value)
    if isinstance(value, dict):
        return all(_all_safe(key) and _all_safe(item) for key, item in value.items())
    return all(_all_safe(item) for item in value) if isinstance(value, (tuple, list)) else True
