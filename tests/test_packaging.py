"""What `make dist` builds: what is in it, that it is the same every time, and that it runs where it should."""

from __future__ import annotations

import email
import importlib.util
import os
import re
import shutil
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import remote_agent
from console.provenance import find_strangers

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("console", "db", "remote_agent", "themes")
PYZ = "glowplug-agent.pyz"
REQUIREMENTS = ("requirements/dev.txt", "requirements/checkpoints.txt")

OTHER_PYTHONS = ("3.10", "3.11", "3.12", "3.13")
"""Versions the agent supports; each that this machine has is used, and this Python always."""


def build(out: Path) -> Path:
    subprocess.run([sys.executable, ROOT / "deploy" / "build.py", "--out", out], check=True, stdout=subprocess.DEVNULL)
    return out


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the three artefacts, built from this tree."""
    return build(tmp_path_factory.mktemp("dist"))


def names_in(artefact: Path) -> list[str]:
    with zipfile.ZipFile(artefact) as archive:
        return archive.namelist()


def metadata_of(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def files_of(package: str) -> set[str]:
    """Return what git would see of a package: everything but bytecode."""
    paths = (path for path in (ROOT / package).rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(ROOT).as_posix() for path in paths}


def pythons() -> list[str]:
    """Return this Python and every other that the agent supports and this machine has, by PATH or pyenv."""
    found = {sys.version_info[:2]: sys.executable}
    for version in OTHER_PYTHONS:
        pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
        candidates: list[Path | str | None] = [
            *sorted(pyenv.glob(f"{version}.*/bin/python")),
            shutil.which(f"python{version}"),
        ]
        for candidate in candidates:
            if candidate is None:
                continue
            told = subprocess.run([candidate, "-c", "import sys; print(*sys.version_info[:2])"], capture_output=True)
            if told.returncode == 0:
                major, minor = told.stdout.split()
                found.setdefault((int(major), int(minor)), str(candidate))
    return [found[version] for version in sorted(found)]


def run_bare(python: str, *arguments: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a Python that sees the standard library alone, in a folder of its own, with next to no environment."""
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "LC_ALL": "C"}
    command = [python, "-I", "-S", *map(str, arguments)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=60)


def test_there_are_three_artefacts_of_one_version(dist: Path) -> None:
    """Both wheels carry the version that the agent itself says, and the console says the same."""
    version = remote_agent.__version__
    wheels = {f"glowplug-{version}-py3-none-any.whl", f"glowplug_agent-{version}-py3-none-any.whl"}
    said = subprocess.run([sys.executable, "-m", "console", "--version"], cwd=ROOT, capture_output=True, text=True)

    assert {path.name for path in dist.iterdir()} == {PYZ, *wheels}
    assert said.stdout == f"glowplug {version}\n"


def test_the_consoles_wheel_holds_its_four_packages_whole_and_nothing_else(dist: Path) -> None:
    """Every file of the four packages is in it; tests, benchmarks and deployment are not."""
    (wheel,) = dist.glob("glowplug-*.whl")
    packed = {name for name in names_in(wheel) if ".dist-info/" not in name}

    assert packed == set().union(*(files_of(package) for package in PACKAGES))
    assert any(name.endswith(".tcss") for name in packed)


def test_the_console_installs_without_torch(dist: Path) -> None:
    """What the console needs is light; torch and its kin come with the extra `local` alone."""
    (wheel,) = dist.glob("glowplug-*.whl")
    metadata = metadata_of(wheel)
    needs = metadata.get_all("Requires-Dist") or []
    always = {re.split(r"[<>=! ;]", need)[0] for need in needs if "extra ==" not in need}

    assert metadata["Requires-Python"] == ">=3.11"
    light = {"asyncssh", "bcrypt", "click", "cronsim", "nvidia-ml-py", "platformdirs", "sqlite-utils", "textual"}
    assert always == light
    assert any(need.startswith("torch") and "extra == 'local'" in need for need in needs)


def test_the_consoles_wheel_has_its_command_and_its_three_extras(dist: Path) -> None:
    """`glowplug` is the console; `local` is what a worker imports, `dev` and `bench` are there to be asked for."""
    (wheel,) = dist.glob("glowplug-*.whl")
    metadata = metadata_of(wheel)
    with zipfile.ZipFile(wheel) as archive:
        (entry_points,) = (archive.read(name) for name in archive.namelist() if name.endswith("entry_points.txt"))
    needs = metadata.get_all("Requires-Dist") or []
    local = {re.split(r"[<>=! ;]", need)[0] for need in needs if "extra == 'local'" in need}

    assert b"glowplug = console.__main__:main" in entry_points
    assert metadata.get_all("Provides-Extra") == ["bench", "dev", "local"]
    assert local == {"torch", "safetensors", "cuda-python", "transformers"}


def test_the_agents_wheel_holds_the_agent_alone_with_its_own_metadata(dist: Path) -> None:
    """Hosts get `remote_agent`, a command, and the NVML bindings as the only dependency."""
    (wheel,) = dist.glob("glowplug_agent-*.whl")
    metadata = metadata_of(wheel)
    with zipfile.ZipFile(wheel) as archive:
        (entry_points,) = (archive.read(name) for name in archive.namelist() if name.endswith("entry_points.txt"))

    assert {name for name in names_in(wheel) if ".dist-info/" not in name} == files_of("remote_agent")
    assert (metadata["Name"], metadata["Requires-Python"]) == ("glowplug-agent", ">=3.10")
    assert [need.split(">")[0] for need in metadata.get_all("Requires-Dist") or []] == ["nvidia-ml-py"]
    assert b"glowplug-agent = remote_agent.__main__:main" in entry_points


def test_each_artefact_carries_its_licences(dist: Path) -> None:
    """The project's licence is in all three, that of the bundled bindings in the single file."""
    for wheel in dist.glob("*.whl"):
        assert any(name.endswith("licenses/LICENSE") for name in names_in(wheel))
    with zipfile.ZipFile(dist / PYZ) as archive:
        assert archive.read("LICENSE") == (ROOT / "LICENSE").read_bytes()
        assert b"NVIDIA Corporation" in archive.read("pynvml-LICENSE.txt")
        assert b"Redistributions in binary form must reproduce" in archive.read("pynvml-LICENSE.txt")


def test_the_single_file_holds_the_agent_and_the_bindings_and_is_executable(dist: Path) -> None:
    """It begins with a line for the shell, may be run, and holds no bytecode."""
    pyz = dist / PYZ

    assert set(names_in(pyz)) == files_of("remote_agent") | {
        "__main__.py",
        "LICENSE",
        "pynvml.py",
        "pynvml-LICENSE.txt",
    }
    assert pyz.read_bytes().startswith(b"#!/usr/bin/env python3\n")
    assert stat.S_IMODE(pyz.stat().st_mode) == 0o755


def test_the_same_sources_give_the_same_bytes(dist: Path, tmp_path: Path) -> None:
    """A second build differs in nothing, so a hash names a version."""
    again = build(tmp_path / "again")

    for artefact in dist.iterdir():
        assert artefact.read_bytes() == (again / artefact.name).read_bytes(), artefact.name


@pytest.mark.parametrize("python", pythons())
def test_the_single_file_runs_on_every_python_that_is_here(dist: Path, tmp_path: Path, python: str) -> None:
    """With nothing installed the agent says its version and what this host is, whatever the folder is called."""
    pyz = shutil.copy(dist / PYZ, tmp_path / "agent with space.pyz")
    version = run_bare(python, pyz, "--version", folder=tmp_path)
    probe = run_bare(python, pyz, "probe", "--json", folder=tmp_path)

    assert (version.stdout, version.stderr) == (f"glowplug-agent {remote_agent.__version__}\n", "")
    assert probe.returncode == 0, probe.stderr
    assert '"cpu_count"' in probe.stdout


@pytest.mark.parametrize("python", pythons())
def test_the_agent_of_the_single_file_serves_on_every_python_that_is_here(
    dist: Path, tmp_path: Path, python: str
) -> None:
    """It starts, answers and ends there, not only in the modules that a version or a probe needs."""
    state = ["--state-dir", str(tmp_path / "state")]
    started = run_bare(python, dist / PYZ, "agentd", *state, folder=tmp_path)
    status = run_bare(python, dist / PYZ, "status", *state, folder=tmp_path)
    stopped = run_bare(python, dist / PYZ, "stop", "--force", "--keeper", *state, folder=tmp_path)

    assert (started.returncode, status.returncode, stopped.returncode) == (0, 0, 0), (started, status, stopped)
    assert status.stdout.startswith("nothing runs and nothing is held\n")


COMPILE_ALL = """
import sys, warnings, zipfile
warnings.simplefilter("error")
with zipfile.ZipFile(sys.argv[1]) as archive:
    names = [name for name in archive.namelist() if name.endswith(".py") and name != "pynvml.py"]
    for name in names:
        compile(archive.read(name), name, "exec")
print(len(names))
"""


@pytest.mark.parametrize("python", pythons())
def test_every_module_of_the_agent_is_valid_there(dist: Path, tmp_path: Path, python: str) -> None:
    """No module, also none that is imported late, uses syntax that an older supported Python lacks."""
    compiled = run_bare(python, "-c", COMPILE_ALL, dist / PYZ, folder=tmp_path)

    assert (compiled.returncode, compiled.stderr) == (0, "")
    assert int(compiled.stdout) > 20


def test_the_single_file_tells_an_old_python_what_it_needs(dist: Path) -> None:
    """Its first module stands for itself, so that the message comes before anything can't be read."""
    with zipfile.ZipFile(dist / PYZ) as archive:
        source = archive.read("__main__.py").decode()
    script = f"import sys; sys.version_info = (3, 8, 0); sys.argv = ['agent']; exec({source!r})"
    refused = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)

    assert refused.returncode == 1
    assert "Python 3.10 or newer is needed" in refused.stderr


@pytest.fixture(scope="module")
def installed(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip installed the console's wheel, without its dependencies."""
    (wheel,) = dist.glob("glowplug-*.whl")
    folder = tmp_path_factory.mktemp("installed")
    options = ["--quiet", "--no-deps", "--no-index", "--no-compile", "--disable-pip-version-check", "--target"]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, folder, wheel], check=True)
    return folder


def test_the_installed_console_builds_the_very_same_single_file(dist: Path, installed: Path, tmp_path: Path) -> None:
    """What `glowplug deploy` makes without a checkout is what `make dist` makes with one."""
    script = "import sys; from pathlib import Path; from console.deployment.agent_file import build_installed"
    command = [sys.executable, "-P", "-c", f"{script}; build_installed(Path(sys.argv[1]))", tmp_path]
    subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(installed)}, check=True)

    assert (tmp_path / PYZ).read_bytes() == (dist / PYZ).read_bytes()
    assert stat.S_IMODE((tmp_path / PYZ).stat().st_mode) == 0o755


def run_glowplug(*search: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run ``glowplug --version`` with these folders searched first."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, search))}
    command = [sys.executable, "-P", "-W", "error", "-m", "console", "--version"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_the_installed_wheel_runs_from_where_it_is_installed(installed: Path, tmp_path: Path) -> None:
    """All four packages come from the wheel, and the command line works."""
    said = run_glowplug(installed, folder=tmp_path)

    assert (said.returncode, said.stderr) == (0, "")
    assert said.stdout == f"glowplug {remote_agent.__version__}\n"


@pytest.mark.parametrize("package", ["db", "themes", "remote_agent"])
def test_the_console_refuses_to_start_among_other_packages_of_these_names(
    installed: Path, tmp_path: Path, package: str
) -> None:
    """A package of the same name that Python finds first is named, with where it lies, and nothing is done."""
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text('__version__ = "9"\n', encoding="utf-8")
    said = run_glowplug(tmp_path, installed, folder=tmp_path)

    assert (said.returncode, said.stdout) == (2, "")
    assert f"installed in {installed}, but Python would load {package} from {tmp_path}." in said.stderr
    assert said.stderr.count("\n") == 1


def test_a_missing_package_is_named(installed: Path, tmp_path: Path) -> None:
    """An installation that lost a package says which."""
    broken = shutil.copytree(installed, tmp_path / "broken")
    shutil.rmtree(broken / "themes")
    environment = {"PYTHONPATH": str(broken), "PATH": os.environ["PATH"]}
    script = "from console.provenance import find_strangers; print(find_strangers())"
    said = subprocess.run([sys.executable, "-S", "-P", "-c", script], env=environment, capture_output=True, text=True)

    assert "would load themes from nowhere" in said.stdout, said.stderr


def test_this_tree_belongs_together() -> None:
    """The packages under test are this tree's own."""
    assert find_strangers() is None


def test_the_lock_pins_everything_once_without_local_builds() -> None:
    """Each line of the lock is one exact version that any index can have."""
    lines = (ROOT / "requirements" / "dev.txt").read_text(encoding="utf-8").splitlines()
    names = [line.split("==")[0].lower() for line in lines]

    assert all(re.fullmatch(r'[\w.-]+==[\w.]+(; sys_platform == "linux")?', line) for line in lines)
    assert len(names) == len(set(names))
    assert "torch==2.13.0" in lines


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder with what `make setup` reads."""
    folder = tmp_path / "clone"
    for name in ("Makefile", "pyproject.toml", "deploy/make_venv.py", *REQUIREMENTS):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.mark.parametrize("exists", [False, True], ids=["none", "too old"])
def test_setup_without_a_fitting_python_says_what_is_needed(tmp_path: Path, clone: Path, exists: bool) -> None:
    """`make setup` with no Python, or too old a one, ends with one line and leaves nothing behind."""
    python = tmp_path / "python"
    if exists:  # one that says no when asked whether it is new enough
        python.write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
        python.chmod(0o755)
    command = ["make", "--no-print-directory", "setup", f"PYTHON={python}"]
    said = subprocess.run(command, cwd=clone, capture_output=True, text=True, check=False)

    assert said.returncode != 0
    assert "needs Python 3.11 or newer" in said.stderr
    assert not (clone / ".venv").exists()


TARGETS = {
    "run": (".venv/bin/glowplug demo",),
    "test": (".venv/bin/python tests/run.py",),
    "check": ("ruff format --check", "ruff check", "mypy", "lint-imports"),
    "dist": (".venv/bin/python deploy/build.py",),
    "bench": (".venv/bin/python -m bench",),
}


@pytest.mark.parametrize("target", TARGETS)
def test_each_target_sets_up_first_and_then_does_what_it_is_for(clone: Path, target: str) -> None:
    """What make would do in a fresh clone, in its order."""
    command = ["make", "--no-print-directory", "--dry-run", target, f"PYTHON={sys.executable}"]
    said = subprocess.run(command, cwd=clone, capture_output=True, text=True, check=True).stdout
    places = [said.find(words) for words in ("deploy/make_venv.py .venv", *TARGETS[target])]

    assert -1 not in places, said
    assert places == sorted(places)


def test_ci_installs_then_checks_then_tests() -> None:
    """The script sets CI, under which a missing program fails, and calls the very targets that everybody calls."""
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    calls = [line.split(" <")[0] for line in lines if line.startswith("make ")]

    assert calls == ["make setup", "make check", "make test"]
    assert 'export CI="${CI:-true}"' in lines


@pytest.mark.parametrize("page", ["README.md", "docs/design.md", "docs/performance.md"])
def test_what_the_documentation_links_to_is_here(page: str) -> None:
    """Pictures and pages, beside the page that names them."""
    text = (ROOT / page).read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#\s]+)\)", text) if "://" not in link]

    assert links
    assert [link for link in links if not ((ROOT / page).parent / link).exists()] == []


def make_venv(clone: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(clone / "deploy" / "make_venv.py"), ".venv"]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)


def test_setup_on_a_python_without_ensurepip_names_the_debian_package(clone: Path, tmp_path: Path) -> None:
    """Debian splits venv off; the message says what to install instead of a traceback."""
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "ensurepip.py").write_text("raise ImportError('split off')\n", encoding="utf-8")
    said = make_venv(clone, PYTHONPATH=str(tmp_path / "hidden"))

    assert said.returncode == 1
    assert f"apt-get install python{sys.version_info[0]}.{sys.version_info[1]}-venv" in said.stderr
    assert not (clone / ".venv").exists()


def test_a_setup_that_failed_half_way_is_begun_anew(clone: Path) -> None:
    """Without its last step a setup leaves no stamp, says why it failed, and the next one starts from nothing."""
    (clone / REQUIREMENTS[0]).write_text("no-such-thing-as-this==1\n", encoding="utf-8")
    first = make_venv(clone, PIP_NO_INDEX="1")
    remains = clone / ".venv" / "half-installed"
    remains.touch()
    second = make_venv(clone, PIP_NO_INDEX="1")

    assert (first.returncode, second.returncode) == (1, 1)
    assert "no-such-thing-as-this" in first.stderr
    assert not (clone / ".venv" / ".installed").exists()
    assert not remains.exists()


FAKE_PIP = """#!/bin/sh
echo 'Collecting torch'
echo 'Installing collected packages: setuptools, torch, zipp'
mkdir -p {packages}/setuptools-80.dist-info
touch {packages}/setuptools-80.dist-info/INSTALLER
echo '  Attempting uninstall: setuptools'
while ! [ -e {folder}/said ]; do sleep 0.01; done
"""


def test_a_setup_says_what_is_being_installed_also_while_pip_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what is in place, of all that pip named; not what pip said last."""
    spec = importlib.util.spec_from_file_location("make_venv", ROOT / "deploy" / "make_venv.py")
    assert spec is not None
    assert spec.loader is not None
    setup = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(setup)
    monkeypatch.setattr(setup, "SAY_EVERY_S", 0.05)
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    before = packages / "pip-25.dist-info" / "INSTALLER"  # of an earlier step
    before.parent.mkdir(parents=True)
    before.touch()
    os.utime(before, (0, 0))
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(FAKE_PIP.format(packages=packages, folder=tmp_path), encoding="utf-8")
    python.chmod(0o755)
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line.split("s  ", 1)[1])
        if "torch (2 of 3)" in line:
            (tmp_path / "said").touch()

    setup._install(tmp_path, ("-r", "x"), say)

    assert lines[-1] == "installing torch (2 of 3)"
    assert "Attempting" not in "".join(lines)
    assert "Attempting uninstall" in (tmp_path / "setup.log").read_text(encoding="utf-8")
