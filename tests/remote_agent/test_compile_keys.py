"""What differs between two warm-ups is found, named and bounded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remote_agent.compile_keys import (
    VALUE_LIMIT,
    choose_nearest,
    digest_key,
    flatten_config,
    list_changes,
    shorten,
    tell_changes,
)

KEYS = st.dictionaries(st.text(max_size=6), st.text(max_size=120), max_size=6)

BEFORE = {"torch": "2.11.0", "driver": "570.1", "config.num_hidden_layers": "32", "old": "1"}
NOW = {"torch": "2.13.0", "driver": "580.2", "config.num_hidden_layers": "40", "new": ""}


@given(KEYS, KEYS)
def test_nothing_differs_between_equal_keys_alone(one: dict[str, str], other: dict[str, str]) -> None:
    """Changes, digests and equality say the same, in both directions."""
    changes = list_changes(one, other)

    assert (changes == ()) == (one == other) == (digest_key(one) == digest_key(other))
    assert {(name, now, before) for name, before, now in changes} == set(list_changes(other, one))


@given(KEYS, KEYS)
def test_changes_lead_from_one_key_to_the_other(before: dict[str, str], now: dict[str, str]) -> None:
    """Each part that differs is named once, with what it was and what it is."""
    reached = dict(before)
    for name, old, new in list_changes(before, now):
        assert before.get(name) == old
        if new is None:
            del reached[name]
        else:
            reached[name] = new

    assert reached == now


@given(KEYS, st.lists(KEYS, max_size=5))
def test_the_nearest_has_no_more_changes_than_any_other(key: dict[str, str], others: list[dict[str, str]]) -> None:
    """Of several as near, the first, which is the last used."""
    nearest = choose_nearest(key, ((other, position) for position, other in enumerate(others)))

    distances = [len(list_changes(other, key)) for other in others]
    assert nearest == (distances.index(min(distances)) if distances else None)


@given(KEYS)
def test_a_digest_does_not_depend_on_the_order_of_parts(key: dict[str, str]) -> None:
    """A record is found again by its key's digest."""
    assert digest_key(dict(reversed(key.items()))) == digest_key(key)


@given(st.text(max_size=400), st.text(max_size=400))
def test_shortened_values_are_one_bounded_line_and_still_differ(one: str, other: str) -> None:
    """What is cut ends in a digest of all of it."""
    assert len(shorten(one)) <= VALUE_LIMIT
    assert len(shorten(one).splitlines()) <= 1
    assert (shorten(one) == shorten(other)) == (one == other)


@given(KEYS, KEYS)
def test_the_text_is_bounded(before: dict[str, str], now: dict[str, str]) -> None:
    """However many parts differ and however long they are."""
    assert len(tell_changes(list_changes(before, now))) < 5 * 3 * VALUE_LIMIT


def test_changes_are_told_with_their_names_and_values() -> None:
    """Configuration by the model's own word for it; a part that came or went as such."""
    text = tell_changes(list_changes(BEFORE, NOW))

    assert (
        text
        == "torch 2.11.0 → 2.13.0, driver 570.1 → 580.2, num_hidden_layers 32 → 40, new (none) → (empty) and 1 more"
    )


@pytest.mark.parametrize(
    ("value", "text"), [("silu", "silu"), (None, "null"), (1e-06, "1e-06"), ({"b": [1], "a": 2}, '{"a": 2, "b": [1]}')]
)
def test_configuration_is_flat_text(value: object, text: str) -> None:
    """The same for the same value, whatever its order."""
    assert flatten_config({"x": value, "left": 1}, without=("left",)) == {"config.x": text}
