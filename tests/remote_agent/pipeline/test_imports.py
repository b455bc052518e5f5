"""What stands in the environment before anything is imported."""

from __future__ import annotations

import gc
import getpass
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from remote_agent.pipeline import imports
from remote_agent.pipeline.init import usable_processors


def test_a_zygote_imports_with_one_thread_and_waits_passively() -> None:
    """Forced, but for the waiting policy, which the host may set otherwise."""
    environment = {"OMP_NUM_THREADS": "8", "USER": "somebody"}
    imports.settle_environment(environment, imports.QUIET_IMPORTS)
    own = {"OMP_WAIT_POLICY": "ACTIVE", "USER": "somebody"}
    imports.settle_environment(own, imports.WORKER_ENVIRONMENT)

    assert environment["OMP_NUM_THREADS"] == environment["TORCHINDUCTOR_COMPILE_THREADS"] == "1"
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE"
    assert own["OMP_WAIT_POLICY"] == "ACTIVE"
    assert "OMP_NUM_THREADS" not in own


def test_a_user_without_a_passwd_entry_gets_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers run under uids that no file knows, and the compile stack asks for a name."""

    def fail() -> str:
        raise KeyError("getpwuid(): uid not found: 4321")

    monkeypatch.setattr(getpass, "getuser", fail)
    environment: dict[str, str] = {}

    imports.name_the_user(environment)

    assert environment["USER"].startswith("uid")


@pytest.mark.parametrize(
    ("name", "is_allowed"),
    [
        ("transformers.models.llama.modeling_llama", True),
        ("transformers.models.llama", True),
        ("transformers.models.", False),
        ("transformers.models.llama.modeling_llama\nos", False),
        ("transformers.models.../os", False),
        ("transformers.utils", False),
        ("os", False),
    ],
)
def test_only_transformers_own_models_are_imported_ahead(name: str, is_allowed: bool) -> None:
    """The names come over a socket."""
    assert imports.is_preimport_allowed(name) == is_allowed


def test_the_collector_makes_no_rounds_while_all_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would find nothing there, and does its work again afterwards."""
    (tmp_path / "module_that_looks.py").write_text("import gc\n\nis_on = gc.isenabled()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(imports, "REQUIRED", ("module_that_looks",))
    monkeypatch.setattr(imports, "OPTIONAL", ())
    monkeypatch.setattr(imports, "build_conversions", lambda: None)

    imports.import_everything()

    assert sys.modules.pop("module_that_looks").is_on is False
    assert gc.isenabled()


def test_a_broken_module_takes_no_other_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An optional package that is broken on a host is left out and said so in the log."""
    (tmp_path / "broken_one.py").write_text("raise RuntimeError('half installed')\n")
    (tmp_path / "good_one.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))

    assert imports.import_what_exists(("broken_one", "good_one", "not_there_one")) == ("broken_one", "not_there_one")
    assert "good_one" in sys.modules


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (None, ""),
        (SimpleNamespace(), "transformers' conversions: ImportError: cannot import name"),
        (SimpleNamespace(get_checkpoint_conversion_mapping=lambda: {}), "transformers' conversions: TypeError: "),
    ],
)
def test_a_release_without_its_conversions_is_imported_all_the_same(
    table: object, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers 4 has none and nothing is said of it; where they were moved or changed the log has a line."""
    monkeypatch.setitem(sys.modules, "transformers.conversion_mapping", table)
    imports.build_conversions()

    printed = capsys.readouterr().err
    assert printed.startswith(said)
    assert printed.count("\n") == bool(said)


def test_a_model_s_code_is_imported_by_its_configuration(tmp_path: Path) -> None:
    """Ahead of the stage that needs it; a configuration that names nothing sensible imports nothing."""
    module = "transformers.models.ernie.modeling_ernie"
    assert module not in sys.modules
    for text in ("{}", "[]", "not JSON", '{"model_type": "../os"}'):
        (tmp_path / "config.json").write_text(text)
        imports.import_model_code(tmp_path)
    imports.import_model_code(tmp_path / "absent")
    (tmp_path / "config.json").write_text('{"model_type": "ernie"}')

    imports.import_model_code(tmp_path)

    assert module in sys.modules


@pytest.mark.parametrize(
    ("content", "expected"), [("150000 100000", 2), ("max 100000", 64), ("10000 100000", 1), ("9900000 100000", 64)]
)
def test_a_container_s_quota_counts_as_its_processors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, expected: int
) -> None:
    """Threads beyond the quota would be throttled."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(64)))
    file = tmp_path / "cpu.max"
    file.write_text(content)

    assert usable_processors(file) == expected
    assert usable_processors(tmp_path / "absent") == 64
