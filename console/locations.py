"""Where the console's files are: the platform's directories, each place overridable by flag and environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import platformdirs

APP = "glowplug"


@dataclass(frozen=True)
class Locations:
    """``known_hosts_file`` holds host keys that were accepted here; ssh's own files are never written."""

    config_file: Path
    history_file: Path
    log_file: Path
    state_directory: Path
    known_hosts_file: Path


def locations(
    environ: Mapping[str, str],
    config: str | Path | None = None,
    history: str | Path | None = None,
    log: str | Path | None = None,
) -> Locations:
    """Return every place; a flag wins over the environment, that over the platform's directories.

    Environment: GLOWPLUG_CONFIG, GLOWPLUG_HISTORY, GLOWPLUG_LOG (files), GLOWPLUG_STATE (a directory).
    """
    state = _pick(None, environ.get("GLOWPLUG_STATE"), platformdirs.user_state_path(APP, appauthor=False))
    config_file = _pick(
        config, environ.get("GLOWPLUG_CONFIG"), platformdirs.user_config_path(APP, False) / "fleet.toml"
    )
    return Locations(
        config_file=config_file,
        history_file=_pick(
            history, environ.get("GLOWPLUG_HISTORY"), platformdirs.user_data_path(APP, False) / "history.db"
        ),
        log_file=_pick(log, environ.get("GLOWPLUG_LOG"), state / "glowplug.log"),
        state_directory=state,
        known_hosts_file=state / "known_hosts",
    )


def _pick(flag: str | Path | None, variable: str | None, default: Path) -> Path:
    chosen = flag or variable
    if not chosen:
        return default
    path = Path(chosen)
    try:
        return path.expanduser()
    except RuntimeError:  # no such user, or no home directory
        return path
