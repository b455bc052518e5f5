"""The address of an HTTP gate: one for all, or with placeholders one for each node that is looked at; pure."""

from __future__ import annotations

import re
import urllib.parse

PLACEHOLDERS = ("{node}", "{host}")
"""A node's name in ``fleet.toml``, and its ``host`` there."""

_BRACED = re.compile(r"\{[^{}]*\}?|\}")


def address_problem(text: str) -> str | None:
    """Say what is wrong with an address; None for one that can be asked once its placeholders are filled."""
    for braced in _BRACED.findall(text):
        if braced not in PLACEHOLDERS:
            return f"{braced[:80]!r} is no placeholder; there are {' and '.join(PLACEHOLDERS)}"
    try:
        parts = urllib.parse.urlsplit(filled(text, "node", "host"))
        is_whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_whole = False
    if not is_whole or not text.isprintable() or " " in text:
        return f"{text[:80]!r} is not an http:// or https:// address"
    if parts.username is not None:
        return f"{text[:80]!r} names a user; the gate logs in nowhere"
    return None


def is_of_each_node(text: str) -> bool:
    """Whether each node that is looked at has an address of its own."""
    return any(placeholder in text for placeholder in PLACEHOLDERS)


def needs_host(text: str) -> bool:
    return "{host}" in text


def filled(text: str, node: str, host: str) -> str:
    """Return the address of that node; one of IPv6 gets its brackets."""
    return text.replace("{node}", node).replace("{host}", f"[{host}]" if ":" in host else host)
