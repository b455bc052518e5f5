"""What may be held on a device, as people write it."""

from __future__ import annotations

import pytest

from remote_agent.protocol.budget import parse_budget


@pytest.mark.parametrize(
    ("text", "total_bytes", "limit_bytes"),
    [
        ("80%", 1000, 800),
        ("100 %", 1000, 1000),
        ("0%", 1000, 0),
        ("12.5%", 1000, 125),
        ("60 GB", 10, 60 * 10**9),
        ("64GiB", 10, 64 << 30),
        ("1.5 TB", None, 1_500_000_000_000),
        ("250", None, 250),
        ("80%", None, None),
    ],
)
def test_a_budget_is_a_share_or_a_size(text: str, total_bytes: int | None, limit_bytes: int | None) -> None:
    """A share needs the device's memory; where that is not known it is no limit."""
    assert parse_budget(text).limit_bytes(total_bytes) == limit_bytes


@pytest.mark.parametrize("text", ["", "80 percent", "-1 GB", "1e9", "80%%", "GB", "60 gb", "0x10", "9" * 400])
def test_what_is_no_budget_is_refused_with_what_is(text: str) -> None:
    """The text says how one is written and shows what was, cut short."""
    with pytest.raises(ValueError, match="neither a percentage") as refused:
        parse_budget(text)

    assert len(str(refused.value)) < 120


def test_more_than_a_device_is_no_share() -> None:
    """A slip of the finger does not lift the limit."""
    with pytest.raises(ValueError, match="'800%' is more than a whole device"):
        parse_budget("800%")
