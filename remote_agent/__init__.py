"""Glowplug's agent: warms models on a GPU host and reports every stage.

Runs on Python 3.10 or newer with the standard library alone; torch and the
NVIDIA bindings are imported only inside zygotes, workers and the sampler.

A serving process uses ``remote_agent.attach`` (see `resident_client`), which is imported when it is asked for.
"""

import importlib
from pathlib import Path

__version__ = "0.1.0"

# The single file is found by a link, which an upgrade moves: a process goes on with the file that it began with.
_home = Path(__path__[0]).parent
if _home.is_file():
    __path__ = [str(_home.resolve() / "remote_agent")]


def __getattr__(name: str) -> object:
    """Import what serving processes use only for them: it needs torch, which the agent never imports."""
    if name == "attach":
        return importlib.import_module("remote_agent.resident_client").attach
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
