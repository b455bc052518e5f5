"""Standard streams that are full, closed or cut off: one plain line at most, and the exit code of what was done."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
WRITING = ["--version", "--help", "config example", "history --json"]


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    config = tmp_path / "fleet.toml"
    config.write_text('[nodes.gone]\ntransport = ["false"]\nconnect_timeout_s = 0.5\n', encoding="utf-8")
    return {
        **os.environ,
        "GLOWPLUG_CONFIG": str(config),
        "GLOWPLUG_HISTORY": str(tmp_path / "history.db"),
        "GLOWPLUG_STATE": str(tmp_path),
    }


def glowplug(arguments: str, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run ``glowplug`` under a shell that sets up its streams."""
    command = f'exec "{sys.executable}" -m console {arguments}'
    return subprocess.run(
        ["/bin/sh", "-c", command], capture_output=True, text=True, cwd=REPOSITORY, timeout=60, env=environ
    )


@pytest.mark.parametrize("verb", WRITING)
def test_a_full_disk_under_stdout_is_one_line_and_exit_1(verb: str, environ: dict[str, str]) -> None:
    """What was asked for is not there: that is said, and nothing of ours leaks."""
    told = glowplug(f"{verb} >/dev/full", environ)

    assert (told.returncode, told.stderr) == (1, "glowplug: stdout: No space left on device\n")


@pytest.mark.parametrize("verb", WRITING)
def test_a_closed_stdout_takes_everything(verb: str, environ: dict[str, str]) -> None:
    """Whoever closed it wants nothing to read; all three closed are no trouble either."""
    told = glowplug(f"{verb} >&-", environ)
    assert (told.returncode, told.stderr) == (0, "")
    assert glowplug(f"{verb} <&- >&- 2>&-", environ).returncode == 0


@pytest.mark.parametrize("stderr", ["/dev/full", "&-"])
@pytest.mark.parametrize(("verb", "code"), [("probe gone", 3), ("probe nobody", 2), ("no-such-verb", 2)])
def test_a_broken_stderr_does_not_change_the_exit_code(
    verb: str, code: int, stderr: str, environ: dict[str, str]
) -> None:
    """What can't be said is still told by the code."""
    assert glowplug(f"{verb} 2>{stderr}", environ).returncode == code


def test_a_closed_stdout_is_never_the_history(environ: dict[str, str]) -> None:
    """A file opened later must not get the number of a closed stream, or output would land in it."""
    assert glowplug("status >&-", environ).returncode == 3

    assert Path(environ["GLOWPLUG_HISTORY"]).read_bytes().startswith(b"SQLite format 3\0")
