"""A missing program is named, and never passed over in CI."""

from __future__ import annotations

import pytest

from tests.needs import need


def test_a_missing_program_fails_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    """CI shows everything or is red."""
    monkeypatch.setenv("CI", "true")

    with pytest.raises(pytest.fail.Exception, match="needs no-such-program: apt-get install a-package"):
        need("no-such-program", "a-package")


def test_a_missing_program_is_left_out_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A newcomer's run passes, and names what it left out."""
    monkeypatch.delenv("CI", raising=False)

    with pytest.raises(pytest.skip.Exception, match="apt-get install a-package"):
        need("no-such-program", "a-package")


def test_a_program_that_is_there_is_found() -> None:
    """The path comes back."""
    assert need("sh", "dash").endswith("/sh")
