"""Where the console's files are: the platform's directories, each place overridable by flag and environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from console.errors import UsageError

APP = "glowplug"


@dataclass(frozen=True)
class Locations:
    """``known_hosts_file`` holds host keys that were accepted here; ssh's own files are never written."""

    config_file: Path
    history_file: Path
    log_file: Path
    state_directory: Path
    known_hosts_file: Path
    cache_directory: Path

    @property
    def environ(self) -> dict[str, str]:
        """What has another Glowplug, started from wherever, use the same places."""
        places = {
            "GLOWPLUG_CONFIG": self.config_file,
            "GLOWPLUG_HISTORY": self.history_file,
            "GLOWPLUG_LOG": self.log_file,
            "GLOWPLUG_STATE": self.state_directory,
            "GLOWPLUG_CACHE": self.cache_directory,
        }
        return {name: str(place.absolute()) for name, place in places.items()}


def locations(
    environ: Mapping[str, str],
    config: str | Path | None = None,
    history: str | Path | None = None,
    log: str | Path | None = None,
) -> Locations:
    """Return every place; a flag wins over the environment, that over the platform's directories.

    Environment: GLOWPLUG_CONFIG, GLOWPLUG_HISTORY, GLOWPLUG_LOG (files), GLOWPLUG_STATE,
    GLOWPLUG_CACHE (directories).
    Raises: UsageError where the user has no home directory and that is needed.
    """
    state = _pick(None, environ, "GLOWPLUG_STATE", lambda: platformdirs.user_state_path(APP, False))
    return Locations(
        config_file=_pick(
            config, environ, "GLOWPLUG_CONFIG", lambda: platformdirs.user_config_path(APP, False) / "fleet.toml"
        ),
        history_file=_pick(
            history, environ, "GLOWPLUG_HISTORY", lambda: platformdirs.user_data_path(APP, False) / "history.db"
        ),
        log_file=_pick(log, environ, "GLOWPLUG_LOG", lambda: state / "glowplug.log"),
        state_directory=state,
        known_hosts_file=state / "known_hosts",
        cache_directory=_pick(None, environ, "GLOWPLUG_CACHE", lambda: platformdirs.user_cache_path(APP, False)),
    )


def _pick(flag: str | Path | None, environ: Mapping[str, str], variable: str, default: Callable[[], Path]) -> Path:
    chosen = flag or environ.get(variable)
    if not chosen:
        try:
            return default()
        except RuntimeError:  # no such user, or no home directory
            raise UsageError(f"this user has no home directory: set HOME (or {variable})") from None
    path = Path(chosen)
    try:
        return path.expanduser()
    except RuntimeError:
        return path
