"""Where files are, and what overrides what."""

from __future__ import annotations

from pathlib import Path

import platformdirs
import pytest

from console.errors import UsageError
from console.locations import locations


def test_files_follow_the_platform_s_directories() -> None:
    """Config, data and state each in their own."""
    found = locations({})

    assert found.config_file == platformdirs.user_config_path("glowplug", False) / "fleet.toml"
    assert found.history_file == platformdirs.user_data_path("glowplug", False) / "history.db"
    assert found.log_file.parent == found.known_hosts_file.parent == found.state_directory


def test_a_flag_wins_over_the_environment_and_that_over_the_platform(tmp_path: Path) -> None:
    """Every place can be overridden both ways."""
    environ = {
        "GLOWPLUG_CONFIG": str(tmp_path / "env.toml"),
        "GLOWPLUG_HISTORY": str(tmp_path / "env.db"),
        "GLOWPLUG_LOG": str(tmp_path / "env.log"),
        "GLOWPLUG_STATE": str(tmp_path / "state"),
        "GLOWPLUG_CACHE": str(tmp_path / "cache"),
    }
    by_environment = locations(environ)
    by_flag = locations(environ, config=tmp_path / "flag.toml", history=str(tmp_path / "flag.db"))

    assert by_environment.config_file == tmp_path / "env.toml"
    assert by_environment.history_file == tmp_path / "env.db"
    assert by_environment.log_file == tmp_path / "env.log"
    assert by_environment.known_hosts_file == tmp_path / "state/known_hosts"
    assert by_environment.cache_directory == tmp_path / "cache"
    assert by_flag.config_file == tmp_path / "flag.toml"
    assert by_flag.history_file == tmp_path / "flag.db"
    assert by_flag.log_file == tmp_path / "env.log"


def test_a_program_finds_the_same_places_wherever_it_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its environment, whatever a flag, a variable or a relative path said here."""
    monkeypatch.chdir(tmp_path)
    found = locations({"GLOWPLUG_STATE": "state", "GLOWPLUG_CACHE": "/c"}, config="fleet.toml")
    there = locations(found.environ)

    assert there.config_file == tmp_path / "fleet.toml"
    assert there.known_hosts_file == tmp_path / "state/known_hosts"
    assert (there.history_file, there.log_file) == (found.history_file, tmp_path / "state/glowplug.log")
    assert there.cache_directory == Path("/c")


def test_an_empty_variable_counts_as_none() -> None:
    """`GLOWPLUG_CONFIG=` does not make the current directory a configuration."""
    assert locations({"GLOWPLUG_CONFIG": ""}) == locations({})


def test_a_tilde_is_the_home_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also where no shell has expanded it."""
    monkeypatch.setenv("HOME", str(tmp_path))

    assert locations({"GLOWPLUG_HISTORY": "~/h.db"}).history_file == tmp_path / "h.db"


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container under a number that no passwd entry knows."""

    def unknown(uid: int) -> object:
        raise KeyError(uid)

    for variable in ("HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)


@pytest.mark.usefixtures("homeless")
def test_without_a_home_it_says_what_to_set() -> None:
    """Each place that is missing names its own variable."""
    for environ, variable in ({}, "GLOWPLUG_STATE"), ({"GLOWPLUG_STATE": "/s"}, "GLOWPLUG_CONFIG"):
        with pytest.raises(UsageError, match=rf"no home directory: set HOME \(or {variable}\)"):
            locations(environ)


@pytest.mark.usefixtures("homeless")
def test_without_a_home_named_places_are_enough() -> None:
    """Nobody asks for a home that is not needed."""
    found = locations({"GLOWPLUG_STATE": "/s", "GLOWPLUG_CONFIG": "/c.toml", "GLOWPLUG_HISTORY": "~/h.db"})

    assert (found.log_file, found.history_file) == (Path("/s/glowplug.log"), Path("~/h.db"))
