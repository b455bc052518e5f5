"""A compile cache between runs: listed by key, cleared by key, age or whole, never under a run or beyond itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from remote_agent.__main__ import main
from remote_agent.agentd.paths import StateDir
from remote_agent.cache_store import clear_cache, in_use, list_cache
from remote_agent.compile_keys import digest_key
from remote_agent.compile_records import CachedFile, WarmUp, write_record
from remote_agent.errors import RefusedError
from remote_agent.protocol.messages import CacheClearParams, CacheListResult

DAY_S = 86400


def keep(root: Path, torch: str, objects: tuple[str, ...], age_s: float = 0.0) -> str:
    """Record a warm-up with objects of 100 bytes and one layer function, and return its digest."""
    key = {"torch": torch, "model": "Llama", "dtype": "bfloat16"}
    digest = digest_key(key)
    function = f"functions/{digest}/f.function"
    for path in (*objects, function):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(bytes(100))
    write_record(root, WarmUp(key, tuple(CachedFile(one, 100) for one in objects), (CachedFile(function, 100),), 1000))
    used_s = time.time() - age_s
    os.utime(root / "records" / f"{digest}.json", (used_s, used_s))
    return digest


def files(root: Path) -> set[str]:
    """Return what the cache has, but its lock."""
    return {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file() and path.name != "lock"}


def test_keys_are_listed_with_what_they_are_and_take(tmp_path: Path) -> None:
    """The last used first; files that are gone do not count and are said."""
    old = keep(tmp_path, "2.10", ("inductor/a.so",), age_s=DAY_S)
    new = keep(tmp_path, "2.11", ("inductor/a.so", "triton/b.cubin"))
    (tmp_path / "triton/b.cubin").unlink()
    (tmp_path / "inductor/unrecorded.py").write_bytes(bytes(50))
    found = list_cache(tmp_path)

    assert [entry.digest for entry in found.entries] == [new, old]
    first, second = found.entries
    assert (first.model, first.created_unix_s, first.size_bytes, first.missing) == ("Llama", 1000, 200, 1)
    assert first.key == {"torch": "2.11", "model": "Llama", "dtype": "bfloat16"}
    assert first.used_unix_s - second.used_unix_s == pytest.approx(DAY_S, abs=60)
    assert found.size_bytes == sum((tmp_path / name).stat().st_size for name in files(tmp_path))


def test_a_directory_that_is_not_there_keeps_nothing(tmp_path: Path) -> None:
    """It is not made by being looked at, and has nothing to clear."""
    assert list_cache(tmp_path / "none") == CacheListResult(str(tmp_path / "none"), (), 0)
    with pytest.raises(RefusedError, match="no such directory"):
        clear_cache(tmp_path / "none", CacheClearParams(everything=True))

    assert not (tmp_path / "none").exists()


def test_one_key_goes_with_what_is_its_own(tmp_path: Path) -> None:
    """An object that another key was built with as well stays for that one."""
    going = keep(tmp_path, "2.10", ("inductor/own.so", "inductor/shared.so"))
    staying = keep(tmp_path, "2.11", ("inductor/shared.so",))
    result = clear_cache(tmp_path, CacheClearParams(going[:6]))

    assert [entry.digest for entry in result.cleared] == [going]
    assert result.freed_bytes > 200
    assert files(tmp_path) == {f"records/{staying}.json", f"functions/{staying}/f.function", "inductor/shared.so"}


def test_what_was_long_unused_goes(tmp_path: Path) -> None:
    """Age counts from the last use, not from the making."""
    old, new = keep(tmp_path, "2.10", ("inductor/a.so",), 3 * DAY_S), keep(tmp_path, "2.11", ("inductor/b.so",), DAY_S)
    result = clear_cache(tmp_path, CacheClearParams(older_than_s=2 * DAY_S))

    assert [entry.digest for entry in result.cleared] == [old]
    assert [entry.digest for entry in list_cache(tmp_path).entries] == [new]


def test_everything_is_the_cache_s_own_folders_and_no_more(tmp_path: Path) -> None:
    """Also what no key accounts for and what was set aside; a file that somebody put there stays."""
    keep(tmp_path, "2.10", ("inductor/a.so",))
    for name in ("triton/x/y.cubin", "aside/inductor/old.so", "notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(bytes(10))
    result = clear_cache(tmp_path, CacheClearParams(everything=True))

    assert len(result.cleared) == 1
    assert files(tmp_path) == {"notes.txt"}


@pytest.mark.parametrize("digest", ["abcd", "0" * 32])
def test_a_key_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path, digest: str) -> None:
    """Nothing goes."""
    there = keep(tmp_path, "2.10", ("inductor/a.so",))
    with pytest.raises(RefusedError, match=f"no key begins with '{digest}'; there is: {there[:12]}"):
        clear_cache(tmp_path, CacheClearParams(digest))


@pytest.mark.parametrize(
    "what", [{}, {"digest": "abcd", "everything": True}, {"digest": "XYZ!"}, {"older_than_s": -1.0}, {"directory": "a"}]
)
def test_a_request_that_says_no_one_thing_is_no_request(what: dict[str, object]) -> None:
    """A slip must not clear everything."""
    with pytest.raises(ValueError, match=r"digest|older_than_s|directory"):
        CacheClearParams(**what)  # type: ignore[arg-type]


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """Return a folder that is none of the cache's, with a file that must stay."""
    folder = tmp_path / "outside"
    (folder / "inner").mkdir(parents=True)
    (folder / "precious.so").write_bytes(bytes(100))
    (folder / "inner" / "f.function").write_bytes(bytes(100))
    return folder


@pytest.mark.parametrize("what", [{"everything": True}, {"older_than_s": 0.0}])
@pytest.mark.parametrize("linked", ["records", "inductor", "triton", "functions", "aside", "inductor/deep"])
def test_a_link_is_not_followed_out_of_the_cache(
    tmp_path: Path, outside: Path, linked: str, what: dict[str, object]
) -> None:
    """Whatever stands in a folder's place, and whatever a record says lies behind it."""
    root = tmp_path / "cache"
    digest = keep(root, "2.10", ("inductor/deep/precious.so", "triton/precious.so"), age_s=10)
    (outside / digest).mkdir()
    (outside / digest / "f.function").write_bytes(bytes(100))
    before = files(outside)
    if (root / linked).exists():
        (root / linked).rename(tmp_path / "away")
    (root / linked).symlink_to(outside)
    list_cache(root)
    clear_cache(root, CacheClearParams(**what))  # type: ignore[arg-type]

    assert files(outside) == before


def test_a_record_names_only_objects_of_the_compile_stack(tmp_path: Path) -> None:
    """A hostile one can't have its reader remove the records of others, or files beside them."""
    (tmp_path / "notes.txt").write_text("mine")
    other = keep(tmp_path, "2.11", ("inductor/a.so",))
    write_record(
        tmp_path,
        WarmUp({"torch": "x"}, (CachedFile("notes.txt", 4), CachedFile(f"records/{other}.json", 1)), (), 1),
    )
    clear_cache(tmp_path, CacheClearParams(digest_key({"torch": "x"})))

    assert (tmp_path / "notes.txt").exists()
    assert [entry.digest for entry in list_cache(tmp_path).entries] == [other]


def test_nothing_goes_while_a_run_uses_the_cache(tmp_path: Path) -> None:
    """Several runs may at a time; with the last one it can be cleared."""
    keep(tmp_path, "2.10", ("inductor/a.so",))
    before = files(tmp_path)
    with in_use(tmp_path), in_use(tmp_path), in_use(None):
        with pytest.raises(RefusedError, match=f"{tmp_path}: a run uses it now") as refused:
            clear_cache(tmp_path, CacheClearParams(everything=True))
        assert files(tmp_path) == before
    clear_cache(tmp_path, CacheClearParams(everything=True))

    assert refused.value.code == "cache_in_use"
    assert files(tmp_path) == set()


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path, outside: Path) -> None:
    """A run goes on without a lock; clearing without one is refused."""
    root = tmp_path / "cache"
    keep(root, "2.10", ("inductor/a.so",))
    (root / "lock").symlink_to(outside / "made")
    with in_use(root), pytest.raises(RefusedError, match="can't be opened as the cache's lock"):
        clear_cache(root, CacheClearParams(everything=True))

    assert not (outside / "made").exists()


def test_a_killed_run_s_lock_is_free(tmp_path: Path) -> None:
    """The kernel gives it back."""
    program = (
        "import os, sys; from pathlib import Path; from remote_agent.cache_store import in_use\n"
        "with in_use(Path(sys.argv[1])): os._exit(9)"
    )
    died = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)

    assert died.returncode == 9
    assert clear_cache(tmp_path, CacheClearParams(everything=True)).cleared == ()


def test_the_host_s_verb_lists_and_clears_without_an_agent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For people a line a key, for machines one document; what is refused is one line and exit code 1."""
    state = StateDir(tmp_path)
    digest = keep(state.cache, "2.10", ("inductor/a.so",))
    here = ["--state-dir", str(tmp_path)]
    codes = [main(["cache", "list", *here]), main(["cache", "list", "--json", *here])]
    line, _, rest = capsys.readouterr().out.partition("\n")
    codes.append(main(["cache", "clear", "--key", digest[:8], "--json", *here]))
    cleared = json.loads(capsys.readouterr().out)
    refused = main(["cache", "clear", "--key", digest[:8], *here])

    assert codes == [0, 0, 0]
    assert line.startswith(f"{digest[:12]}  Llama  0.0 MB  used 20")
    assert json.loads(rest.partition("\n")[2])["entries"][0]["digest"] == digest
    assert [entry["digest"] for entry in cleared["cleared"]] == [digest]
    assert refused == 1
    assert "no key begins with" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv", [["clear"], ["list", "--all"], ["clear", "--key", "?"], ["clear", "--older-than", "-1"]]
)
def test_a_command_line_that_names_no_one_thing_is_a_usage_error(argv: list[str], tmp_path: Path) -> None:
    """Exit code 2, as for any verb."""
    assert main(["cache", *argv, "--state-dir", str(tmp_path)]) == 2


def test_the_host_s_verb_refuses_an_age_in_days(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The unit in which it was given."""
    assert main(["cache", "clear", "--older-than", "-3", "--state-dir", str(tmp_path)]) == 2

    assert capsys.readouterr().err.endswith("error: --older-than: -3 is not within 0..100000 days\n")
