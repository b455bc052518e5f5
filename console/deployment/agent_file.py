"""The agent as one file: the sources of ``remote_agent``, the NVML bindings and both licences, in a zip that runs.

The same sources give the same bytes, from a checkout as from an installed wheel, so a hash names a version.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import io
import os
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import remote_agent
from console.errors import GlowplugError

PYZ_NAME = "glowplug-agent.pyz"
SHEBANG = b"#!/usr/bin/env python3\n"
EARLIEST = (1980, 1, 1, 0, 0, 0)

PYZ_MAIN = '''\
"""Runs Glowplug's agent from this one file."""

import sys

if sys.version_info < (3, 10):
    sys.exit("glowplug-agent: Python 3.10 or newer is needed, this is " + sys.version.split()[0])

from remote_agent.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
'''


class BuildError(GlowplugError):
    """The agent's file can't be built; the text says why."""


@dataclass(frozen=True)
class AgentFile:
    """What is uploaded. ``path``: where a copy of ``content`` lies on this machine."""

    version: str
    content: bytes
    path: Path

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()


def build_installed(directory: Path) -> AgentFile:
    """Build the file from the package that this console runs with, and keep it in ``directory``.

    Raises: BuildError.
    """
    licence = _installed_licence()
    content = build_content(Path(remote_agent.__file__).parent, licence)
    path = directory / PYZ_NAME
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_file(path, content)
    except OSError as error:
        raise BuildError(f"{path}: can't be written: {error.strerror}") from error
    return AgentFile(remote_agent.__version__, content, path)


def build_content(package: Path, licence: bytes) -> bytes:
    """Return the file's bytes: ``package`` is the folder of ``remote_agent``, ``licence`` its own.

    Raises: BuildError without nvidia-ml-py, or if its licence is not where it was.
    """
    bundled = _find_pynvml().read_bytes()
    contents = {name: path.read_bytes() for path, name in agent_files(package)}
    contents |= {
        "__main__.py": PYZ_MAIN.encode(),
        "LICENSE": licence,
        "pynvml.py": bundled,
        "pynvml-LICENSE.txt": _licence_of(bundled.decode("utf-8")).encode(),
    }
    file = io.BytesIO()
    file.write(SHEBANG)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name in sorted(contents):
            entry = zipfile.ZipInfo(name, EARLIEST)
            entry.create_system = 3
            entry.external_attr = 0o100644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, contents[name], compresslevel=9)
    return file.getvalue()


def write_file(path: Path, content: bytes) -> None:
    """Replace ``path`` by an executable file of that content, never by a part of it. Raises: OSError."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_bytes(content)
        beside.chmod(0o755)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def agent_files(package: Path) -> Iterator[tuple[Path, str]]:
    """Yield each file of ``remote_agent`` with its name inside an artefact."""
    for path in sorted(package.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc":
            yield path, path.relative_to(package.parent).as_posix()


def _installed_licence() -> bytes:
    """Return our own licence, which an installation has beside its metadata. Raises: BuildError"""
    try:
        text = importlib.metadata.distribution("glowplug").read_text("licenses/LICENSE")
    except importlib.metadata.PackageNotFoundError:
        text = None
    if text is None:
        raise BuildError("this installation of glowplug has lost its metadata; install it again")
    return text.encode()


def _licence_of(source: str) -> str:
    """Return the licence that stands at the head of the bindings, without the comment marks.

    Raises: BuildError if it does not stand there.
    """
    lines = []
    for line in source.splitlines()[1:]:
        if line.startswith("####") or not line.startswith("#"):
            break
        lines.append(line[1:].removeprefix(" ").rstrip())
    text = "\n".join(lines) + "\n"
    if "Copyright" not in text or "Redistribution and use" not in text or "WARRANTIES" not in text:
        raise BuildError("nvidia-ml-py's licence is not at the head of pynvml.py any more; see console/deployment")
    return text


def _find_pynvml() -> Path:
    spec = importlib.util.find_spec("pynvml")
    if spec is None or spec.origin is None or Path(spec.origin).name != "pynvml.py":
        raise BuildError("nvidia-ml-py is not installed beside this console; install glowplug again (or make setup)")
    return Path(spec.origin)
