"""Builds the three artefacts into ``dist/``: the console's wheel, the agent's wheel and the agent as one file.

Needs no network: the build backend and nvidia-ml-py are taken from the environment this runs in.
The same sources give the same bytes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from console.deployment.agent_file import PYZ_NAME, BuildError, agent_files, build_content, write_file

ROOT = Path(__file__).resolve().parent.parent


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
        for path, name in agent_files(ROOT / "remote_agent"):
            (project / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, project / name)
        for path in (ROOT / "LICENSE", *(ROOT / "deploy" / "agent").iterdir()):
            shutil.copyfile(path, project / path.name)
        build_wheel(project, out)


def build_pyz(target: Path) -> None:
    """Write the agent, with the bundled NVML bindings and both licences, as one executable file.

    Raises: BuildError.
    """
    write_file(target, build_content(ROOT / "remote_agent", (ROOT / "LICENSE").read_bytes()))


if __name__ == "__main__":
    sys.exit(main())
