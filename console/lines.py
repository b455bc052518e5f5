"""A line of text as dialogs and screens pass it on: pieces with a role each; ``console.widgets.paint`` draws it."""

from __future__ import annotations

Piece = tuple[str, str]
"""Text and role."""

Line = tuple[Piece, ...]
