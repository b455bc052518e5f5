"""Builds the three artefacts into ``dist/``: the console's wheel, the agent's wheel and the agent as one file.

Needs no network: the build backend and nvidia-ml-py are taken from the environment this runs in.
The same sources give the same bytes.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
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


class BuildError(Exception):
    """An artefact can't be built; the text says why."""


def main() -> int:
    """Build everything and return 0, or say what is missing and return 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder for the artefacts")
    out = parser.parse_args().out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    for old in (*out.glob("glowplug-*.whl"), *out.glob("glowplug_agent-*.whl"), out / PYZ_NAME):
        old.unlink(missing_ok=True)
    try:
        build_wheel(ROOT, out)
        build_agent_wheel(out)
        build_pyz(out / PYZ_NAME)
    except BuildError as error:
        print(f"make dist: {error}", file=sys.stderr)
        return 1
    for artefact in sorted(out.glob("glowplug*")):
        print(f"{artefact.stat().st_size:>9,} bytes  {artefact}")
    return 0


def build_wheel(project: Path, out: Path) -> None:
    """Build the wheel of the project in that folder.

    Raises: BuildError with the backend's own words.
    """
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "315532800"}
    built = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, check=False)
    if built.returncode != 0:
        raise BuildError(f"the wheel in {project} can't be built:\n{built.stdout}{built.stderr}")


def build_agent_wheel(out: Path) -> None:
    """Build the wheel that holds ``remote_agent`` alone, with its own metadata."""
    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder)
        for path, name in agent_files():
            (project / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, project / name)
        for path in (ROOT / "LICENSE", *(ROOT / "deploy" / "agent").iterdir()):
            shutil.copyfile(path, project / path.name)
        build_wheel(project, out)


def build_pyz(target: Path) -> None:
    """Write the agent, with the bundled NVML bindings and both licences, as one executable file.

    Raises: BuildError without nvidia-ml-py, or if its licence is not where it was.
    """
    pynvml = _find_pynvml()
    bundled = pynvml.read_bytes()
    contents = {name: path.read_bytes() for path, name in agent_files()}
    contents |= {
        "__main__.py": PYZ_MAIN.encode(),
        "LICENSE": (ROOT / "LICENSE").read_bytes(),
        "pynvml.py": bundled,
        "pynvml-LICENSE.txt": licence_of(bundled.decode("utf-8")).encode(),
    }
    with target.open("wb") as file:
        file.write(SHEBANG)
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
            for name in sorted(contents):
                entry = zipfile.ZipInfo(name, EARLIEST)
                entry.create_system = 3
                entry.external_attr = 0o100644 << 16
                entry.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(entry, contents[name], compresslevel=9)
    target.chmod(0o755)


def agent_files() -> Iterator[tuple[Path, str]]:
    """Yield each file of ``remote_agent`` with its name inside an artefact."""
    for path in sorted((ROOT / "remote_agent").rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc":
            yield path, path.relative_to(ROOT).as_posix()


def licence_of(source: str) -> str:
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
        raise BuildError("nvidia-ml-py's licence is not at the head of pynvml.py any more; see deploy/build.py")
    return text


def _find_pynvml() -> Path:
    spec = importlib.util.find_spec("pynvml")
    if spec is None or spec.origin is None or Path(spec.origin).name != "pynvml.py":
        raise BuildError("nvidia-ml-py is not installed here; run make setup")
    return Path(spec.origin)


if __name__ == "__main__":
    sys.exit(main())
