"""What went wrong is told in one line."""

from __future__ import annotations

import pytest

from remote_agent.pipeline.failures import brief


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("no compiler here\nwith a second line", "RuntimeError: no compiler here"),
        ("backend='x' raised:\n\nTypeError: a  word\nmore", "RuntimeError: backend='x' raised: TypeError: a word"),
        ("raised:", "RuntimeError: raised:"),
        ("", "RuntimeError:"),
    ],
)
def test_an_error_is_told_by_its_first_line_that_says_something(text: str, told: str) -> None:
    """A line that ends in a colon only leads to the next."""
    assert brief(RuntimeError(text)) == told
