"""Versions of the agent's file beside each other, without a process of it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from remote_agent import versions as module
from remote_agent.versions import KEPT, STALE_S, Versions


@pytest.fixture
def versions(tmp_path: Path) -> Versions:
    """A place below a folder that is reached by a link, as homes sometimes are."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "home").symlink_to(tmp_path / "disk")
    place = Versions(tmp_path / "home" / "agent.pyz")
    place.folder.mkdir()
    return place


@pytest.fixture
def make(versions: Versions, tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that stores a version of that content."""

    def store(content: str) -> Path:
        source = tmp_path / "source.pyz"
        source.write_text(content)
        return versions.store(source)

    return store


def test_the_link_leads_to_what_was_switched_to_and_the_former_is_known(
    versions: Versions, make: Callable[[str], Path]
) -> None:
    """Also the plain file that somebody copied there by hand is a version then."""
    versions.link.write_text("by hand")
    one, two = make("one"), make("two")
    by_hand = versions.switch(one)
    was_one = versions.switch(two)

    assert by_hand is not None
    assert (by_hand.read_text(), was_one) == ("by hand", one)
    assert (versions.link.is_symlink(), versions.current(), versions.former()) == (True, two, one)
    assert versions.link.read_text() == "two"


def test_a_stored_version_is_no_other_file_s_bytes(
    versions: Versions, make: Callable[[str], Path], tmp_path: Path
) -> None:
    """What is written into the source later changes nothing; a stored file that was damaged is put right."""
    stored = make("one")
    (tmp_path / "source.pyz").write_text("one, and more")
    kept = stored.read_text()
    stored.write_text("damaged")

    assert kept == "one"
    assert make("one") == stored
    assert stored.read_text() == "one"


def test_old_versions_go_but_not_what_is_needed(
    versions: Versions, make: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Current, former, the newest, and what a process was started from stay; where other hosts may look, all do."""
    current, former, used, *rest = (make(str(number)) for number in range(4 + KEPT))
    versions.switch(former)
    versions.switch(current)
    user = [sys.executable, "-c", "print(flush=True); input()", str(used)]
    with subprocess.Popen(user, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        monkeypatch.setattr(module, "filesystem_of", lambda path: "nfs4")
        shared = versions.prune()
        monkeypatch.undo()
        removed = versions.prune()
        process.communicate(b"\n")
    left = {path for path in (current, former, used, *rest) if path.exists()}

    assert shared == []
    assert left == {current, former, used, *rest[-KEPT:]}
    assert removed == [rest[0].parent.name]


def test_what_an_interrupted_installation_left_goes_once_it_is_old(
    versions: Versions, make: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upload that may still be under way stays."""
    uploads = [versions.folder / ".upload-1.pyz", make("one").parent / ".new-1"]
    for path in uploads:
        path.write_text("half of i")
    versions.prune()
    young = [path.exists() for path in uploads]
    monkeypatch.setattr(module, "STALE_S", -STALE_S)
    versions.prune()

    assert (young, [path.exists() for path in uploads]) == ([True, True], [False, False])
