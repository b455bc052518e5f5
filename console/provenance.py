"""Makes sure that Glowplug's own packages are loaded, and no others of the same common names."""

from __future__ import annotations

import importlib.util
from pathlib import Path

PACKAGES = ("console", "db", "themes", "remote_agent")


def find_strangers() -> str | None:
    """Return one line that names the packages which would be loaded from elsewhere; None when all belong together.

    Only paths are looked at; nothing is imported.
    """
    homes = {name: _home(name) for name in PACKAGES}
    own = homes["console"]
    strangers = [f"{name} from {homes[name] or 'nowhere'}" for name in PACKAGES if homes[name] != own]
    if not strangers:
        return None
    return (
        f"Glowplug is installed in {own}, but Python would load {', '.join(strangers)}. "
        "Install Glowplug into an environment of its own (pipx install glowplug), "
        "and see that PYTHONPATH names no folder with packages of these names."
    )


def _home(name: str) -> str | None:
    """Return the folder that holds the package, links resolved; None for none, or one without a file."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None:
        return None
    return str(Path(spec.origin).resolve().parent.parent)
