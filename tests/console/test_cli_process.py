"""The command as a process: what it imports, and that every verb explains itself."""

from __future__ import annotations

import subprocess
import sys

import pytest

from console.cli import run
from console.cli.main import VERBS
from tests.console.verbs import REPOSITORY


def test_the_console_itself_never_imports_torch() -> None:
    """Every module of it, its screens too, runs on a workstation that has none of a GPU host's packages."""
    program = (
        "import importlib, pkgutil, sys, console, db, themes;"
        "found = [module.name for package in (console, db, themes)"
        " for module in pkgutil.walk_packages(package.__path__, package.__name__ + '.')"
        " if not module.name.endswith('__main__')];"
        "[importlib.import_module(name) for name in found];"
        "print(len(found) > 100, sorted({'torch', 'transformers', 'safetensors', 'pynvml', 'cuda'} & set(sys.modules)))"
    )

    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=REPOSITORY)

    assert loaded.stdout == "True []\n"


def test_no_verb_imports_textual_or_torch() -> None:
    """The headless half starts without the screen's half, and never loads what only a GPU host needs.

    One process for all of them: whichever is the first to load any of it is named.
    """
    program = (
        "import sys, console.cli.main as m, console.fleet, console.link, console.transports.ssh\n"
        f"for verb in {sorted(VERBS)!r}:\n"
        "    assert m.glowplug.get_command(None, verb) is not None, verb\n"
        "    print(verb, sorted({'textual', 'torch', 'rich'} & set(sys.modules)))\n"
    )

    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=REPOSITORY)

    assert loaded.stdout.splitlines() == [f"{verb} []" for verb in sorted(VERBS)]


def test_the_version_needs_next_to_nothing() -> None:
    """--version answers without click, asyncio, asyncssh or sqlite: that is what keeps it quick."""
    program = (
        "import sys; before = set(sys.modules); from console.cli import run; code = run(['--version']);"
        "print(code, sorted({'click', 'asyncio', 'asyncssh', 'sqlite3', 'textual'} & (set(sys.modules) - before)))"
    )

    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=REPOSITORY)

    assert told.stdout.splitlines()[0].startswith("glowplug ")
    assert told.stdout.splitlines()[1] == "0 []"


@pytest.mark.parametrize("verb", [[], *([verb] for verb in VERBS), ["config", "check"]])
def test_every_verb_explains_itself(verb: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """--help is exit 0 and names the verb."""
    assert run([*verb, "--help"]) == 0

    assert f"Usage: {' '.join(['glowplug', *verb])}" in capsys.readouterr().out
