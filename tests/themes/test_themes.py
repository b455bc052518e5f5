"""Both themes are complete and readable; stylesheets know every role."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from textual.color import Color

import themes
from console.widgets.paint import ROLES

READABLE, LARGE = 4.5, 3.0
TEXT_COLOURS = ("foreground", "primary", "secondary", "success", "warning", "error", "accent")


def contrast(one: Color, other: Color) -> float:
    """Return the contrast ratio of WCAG 2."""
    lights = sorted((_luminance(one), _luminance(other)))
    return (lights[1] + 0.05) / (lights[0] + 0.05)


def _luminance(colour: Color) -> float:
    parts = [value / 12.92 if value <= 0.03928 else ((value + 0.055) / 1.055) ** 2.4 for value in colour.normalized]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


@pytest.mark.parametrize("name", themes.NAMES)
def test_every_colour_that_carries_words_can_be_read(name: str) -> None:
    """At least 4.5 to 1 on the background and on the surface."""
    theme = themes.load(name)
    for ground in (theme.background, theme.surface):
        for colour in TEXT_COLOURS:
            assert contrast(Color.parse(getattr(theme, colour)), Color.parse(str(ground))) >= READABLE, colour


@pytest.mark.parametrize("name", themes.NAMES)
def test_muted_words_can_be_read_too(name: str) -> None:
    """Roles that dim the foreground stay above what words need; faint ones above what signs need."""
    theme = themes.load(name)
    ground, ink = Color.parse(str(theme.background)), Color.parse(str(theme.foreground))
    assert contrast(ground.blend(ink, 0.65), ground) >= READABLE
    assert contrast(ground.blend(ink, 0.52), ground) >= LARGE


def test_dark_and_light_are_what_they_say() -> None:
    """The dark one is first, and the default."""
    assert [themes.load(name).dark for name in themes.NAMES] == [True, False]


def test_a_theme_with_a_missing_or_unknown_colour_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the file's name and the key."""
    (tmp_path / "broken.toml").write_text('dark = true\n[colours]\nprimary = "#fff"\ngreen = "#0f0"\n')
    monkeypatch.setattr(themes, "_DIRECTORY", tmp_path)

    with pytest.raises(ValueError, match=r"broken\.toml: .*background.*green"):
        themes.load("broken")


def test_the_stylesheets_say_what_every_role_looks_like() -> None:
    """And of no role that there is not."""
    sheet = (themes.stylesheets()[0]).read_text(encoding="utf-8")

    assert set(re.findall(r"\.role--([a-z-]+)", sheet)) == set(ROLES)


def test_every_stylesheet_is_there() -> None:
    """They lie beside the package, so that a wheel carries them."""
    assert all(path.is_file() and path.parent == Path(themes.__file__).parent for path in themes.stylesheets())
