"""Breaks cleaned lines into a few of limited width. Pure."""

from __future__ import annotations

from itertools import groupby

from rich.cells import cell_len, set_cell_size

from console.widgets.paint import Line, plain, width_of

HANG = "    "


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


def wrap_line(line: Line, width: int) -> list[Line]:
    """Return the line in as many of at most ``width`` cells as it needs; those after the first hang further in.

    Where that leaves next to no room they begin at the left.
    """
    if width_of(line) <= width:
        return [line]
    text = plain(line)
    roles = [role for piece, role in line for _ in piece]
    lead = text[: len(text) - len(text.lstrip())]
    hang = lead + HANG
    if cell_len(hang) > width // 2:
        lead = hang = ""
    parts = wrap(text, width - cell_len(hang), len(text))
    lines: list[Line] = []
    at = 0
    for part in parts:
        at = text.index(part, at)
        pieces = groupby(zip(part, roles[at:], strict=False), key=lambda one: one[1])
        start = (hang if lines else lead, roles[at])
        lines.append((start, *(("".join(char for char, _ in group), role) for role, group in pieces)))
        at += len(part)
    return lines
