"""For all tests: the user's own files stay out, GPU tests wait to be asked for, nothing is left running."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import tempfile
import uuid
from pathlib import Path

import hypothesis
import pytest

from tests.leftovers import MARK, end, find_leftovers

LEFTOVER_GRACE_S = 10.0
LEFTOVERS = pytest.StashKey[list[str]]()
HOME_FOLDER = pytest.StashKey[Path]()

# What tests start would else compile all that it imports, each process anew: containers often say not to keep it.
# Here, since conftest.py below imports ours before anything is configured.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A loaded machine is slow, not wrong.
hypothesis.settings.register_profile(
    "glowplug", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow], derandomize="CI" in os.environ
)
hypothesis.settings.load_profile("glowplug")


def pytest_configure(config: pytest.Config) -> None:
    """Point the platform's directories into a folder of this session's and mark all processes it starts."""
    gc.disable()
    folder = Path(tempfile.mkdtemp(prefix="glowplug-tests-"))
    config.stash[HOME_FOLDER] = folder
    for name in [name for name in os.environ if name.startswith("GLOWPLUG_") and name != "GLOWPLUG_CASES"]:
        del os.environ[name]
    for kind in ("CONFIG", "DATA", "STATE", "CACHE"):
        os.environ[f"XDG_{kind}_HOME"] = str(folder / kind.lower())
    os.environ[MARK] = str(uuid.uuid4())
    # Half of a small compile's time, which tests can do without: what the processor says of itself is believed,
    # and headers are not compiled ahead for kernels that are few.
    os.environ.update(TORCHINDUCTOR_VEC_ISA_OK="1", TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS="0")
    # Threads of torch that wait for work give their core to the tests beside, instead of spinning on it.
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    # A shell starts background jobs with SIGINT ignored, and nohup with SIGHUP; what tests start would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the session's folder."""
    shutil.rmtree(config.stash[HOME_FOLDER], ignore_errors=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests that need a GPU unless ``-m`` asks for them."""
    if "gpu" in config.getoption("-m"):
        return
    left_out = [item for item in items if item.get_closest_marker("gpu")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish() -> None:
    """Look for garbage less often, and not among what the imports left: with screens that is a third of the time."""
    gc.freeze()
    gc.enable()
    gc.set_threshold(20_000)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a session that leaves a process behind, and end the process."""
    basetemp = getattr(session.config, "_tmp_path_factory", None)
    folder = getattr(basetemp, "_basetemp", None)
    left = find_leftovers(os.environ[MARK], folder, LEFTOVER_GRACE_S)
    end(left)
    session.config.stash[LEFTOVERS] = [f"{leftover.pid}: {leftover.command}" for leftover in left]
    if left and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Name what was left running."""
    left = config.stash.get(LEFTOVERS, [])
    if left:
        terminalreporter.section("left running by these tests, now killed", red=True)
        for line in left:
            terminalreporter.line(line)
