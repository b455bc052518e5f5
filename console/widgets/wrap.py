"""Breaks one cleaned line into a few of limited width. Pure."""

from __future__ import annotations

from rich.cells import cell_len, set_cell_size


def wrap(text: str, width: int, max_lines: int) -> list[str]:
    """Return at most ``max_lines`` lines of at most ``width`` cells, broken at blanks where there are any.

    What does not fit is left on the last line, for the caller to crop.
    """
    lines: list[str] = []
    rest = text.strip()
    while rest and width > 0 and len(lines) < max_lines - 1 and cell_len(rest) > width:
        head = set_cell_size(rest, width).rstrip()
        at = len(head)
        if not rest[at : at + 1].isspace() and (blank := head.rfind(" ")) > 0:
            at = blank
        lines.append(rest[:at].rstrip())
        rest = rest[at:].lstrip()
    if rest:
        lines.append(rest)
    return lines
