"""Programs of the operator's: real processes, ended with all that they started, whatever ends the console."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from console.rollout import hooks
from console.rollout.hooks import OUTPUT_LINES, environment, run_program

PATIENCE_S = 30.0


def script(folder: Path, text: str) -> tuple[str, ...]:
    """Return the argv of a program with this text."""
    path = folder / "program"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return (str(path),)


def soon(holds: Callable[[], object], what: str) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.01)


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def test_a_program_gets_its_arguments_and_environment_as_they_are(tmp_path: Path) -> None:
    """No shell looks at them: a dollar sign, a quote and a star are what they are."""
    argv = script(tmp_path, 'printf "%s\\n" "$1" "$GLOWPLUG_ROLLOUT_NODE" "$GLOWPLUG_ROLLOUT_BATCH" "$OTHER"')
    environ = environment({**os.environ, "OTHER": "kept"}, "uid", "shift", [("gpu-1", 1, 3)])
    ended = await run_program((*argv, "$HOME '; * "), environ, 30.0)

    assert ended.output == ("$HOME '; * ", "gpu-1", "2", "kept")
    assert (ended.code, ended.reason, ended.succeeded, ended.tries) == (0, "", True, 1)


async def test_what_a_program_says_is_told_line_by_line_while_it_runs(tmp_path: Path) -> None:
    """The last whole line each time, cleaned; it waits here for what was told of the one before."""
    go, lines = tmp_path / "go", list[str]()
    wait = f'while ! [ -e "{go}" ]; do sleep 0.01; done'
    argv = script(tmp_path, f'printf "first\n\033[31mweight 10%%\033[0m\nhalf a li"; {wait}; echo ne')

    def said(line: str) -> None:
        lines.append(line)
        if "weight 10%" in lines:
            go.touch()

    ended = await run_program(argv, os.environ, 30.0, said=said)

    assert ended.code == 0
    assert "half a li" not in lines
    assert lines[-2:] == ["weight 10%", "half a line"]


def test_what_differs_among_nodes_is_empty_and_all_are_named() -> None:
    """For a gate, which is about several."""
    environ = environment({}, "uid", "gate", [("a", 0, 1), ("b", 0, 2)])

    assert environ == {
        "GLOWPLUG_ROLLOUT_ID": "uid",
        "GLOWPLUG_ROLLOUT_NODE": "",
        "GLOWPLUG_ROLLOUT_NODES": "a b",
        "GLOWPLUG_ROLLOUT_BATCH": "1",
        "GLOWPLUG_ROLLOUT_ATTEMPT": "",
        "GLOWPLUG_ROLLOUT_PHASE": "gate",
        "GLOWPLUG_ROLLOUT_DRY_RUN": "0",
    }


async def test_how_a_program_failed_is_said_with_its_last_words(tmp_path: Path) -> None:
    """By its code, by its signal, or because there is none."""
    failed = await run_program(script(tmp_path, "echo no socket >&2; exit 3"), os.environ, 30.0)
    killed = await run_program(script(tmp_path, "kill -TERM $$"), os.environ, 30.0)
    nameless = await run_program(script(tmp_path, f"kill -{signal.SIGRTMIN + 2} $$"), os.environ, 30.0)
    missing = await run_program(("/nowhere/hook",), os.environ, 30.0)

    assert (failed.code, failed.reason) == (3, "ended with 3: no socket")
    assert (killed.code, killed.reason) == (-15, "was ended by SIGTERM")
    assert nameless.reason == f"was ended by signal {signal.SIGRTMIN + 2}"
    assert missing.reason == "could not be started: /nowhere/hook: No such file or directory"


async def test_75_is_tried_again_until_it_ends_otherwise(tmp_path: Path) -> None:
    """With a pause, and the output is that of the last try."""
    argv = script(
        tmp_path, f"echo x >> {tmp_path}/tries; n=$(wc -l < {tmp_path}/tries); echo try $n; [ $n -ge 3 ] || exit 75"
    )
    ended = await run_program(argv, os.environ, 30.0, pause_s=0.01)

    assert (ended.code, ended.tries, ended.output) == (0, 3, ("try 3",))


async def test_75_without_end_is_a_failure_once_the_time_is_over(tmp_path: Path) -> None:
    """All tries share one time-out."""
    ended = await run_program(script(tmp_path, "exit 75"), os.environ, 0.3, pause_s=0.05)

    assert not ended.succeeded
    assert ended.tries > 1 or ended.code is None


async def test_out_of_time_the_whole_group_is_ended(tmp_path: Path) -> None:
    """What the program started as well."""
    argv = script(tmp_path, f"sleep 300 & echo $! > {tmp_path}/child; echo begun; wait")
    ended = await run_program(argv, os.environ, 2.0)
    child = int((tmp_path / "child").read_text())

    assert (ended.code, ended.reason) == (None, "took over 2 s and was ended: begun")
    soon(lambda: not lives(child), "its child lives")


async def test_what_a_program_changed_it_may_put_back_though_it_was_started_by_a_shell(tmp_path: Path) -> None:
    """SIGTERM comes first, to all of the group; nobody waits for the shell alone, which ends at once."""
    inner = tmp_path / "inner"
    inner.write_text('#!/bin/sh\ntrap "sleep 0.3; echo put back; exit 1" TERM\necho begun\nsleep 300 & wait\n')
    inner.chmod(0o755)
    ended = await run_program(script(tmp_path, f"{inner}; exit 1"), os.environ, 2.0)

    assert (ended.code, ended.reason) == (None, "took over 2 s and was ended: put back")


async def test_a_program_that_does_not_heed_sigterm_is_killed(tmp_path: Path) -> None:
    """After a few seconds, with what it started."""
    argv = script(tmp_path, f"trap '' TERM; sleep 300 & echo $! > {tmp_path}/child; wait; sleep 300")
    ended = await run_program(argv, os.environ, 3.0)
    child = int((tmp_path / "child").read_text())

    assert ended.code is None
    soon(lambda: not lives(child), "its child lives")


async def test_a_cancelled_program_is_gone_when_the_cancel_returns(tmp_path: Path) -> None:
    """So a back-out never runs beside the hook that it undoes."""
    argv = script(tmp_path, f"echo $$ > {tmp_path}/pid.new; mv {tmp_path}/pid.new {tmp_path}/pid; exec sleep 300")
    task = asyncio.ensure_future(run_program(argv, os.environ, 300.0))
    deadline_s = time.monotonic() + PATIENCE_S
    while not (tmp_path / "pid").exists():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.wait({task})

    assert not lives(int((tmp_path / "pid").read_text()))


async def test_what_a_program_leaves_running_neither_holds_it_up_nor_is_ended(tmp_path: Path) -> None:
    """It may start a server; that one has the pipe still open."""
    ended = await run_program(script(tmp_path, f"sleep 300 & echo $! > {tmp_path}/child; echo done"), os.environ, 60.0)
    child = int((tmp_path / "child").read_text())
    try:
        assert (ended.code, ended.output) == (0, ("done",))
        assert lives(child)
    finally:
        os.kill(child, signal.SIGKILL)


async def test_much_and_hostile_output_is_cut_and_cleaned(tmp_path: Path) -> None:
    """The last lines are kept, and no control character of theirs."""
    argv = script(tmp_path, "seq 1 20000; printf '\\033]52;c;AAAA\\007last\\n'")
    ended = await run_program(argv, os.environ, 30.0)

    assert len(ended.output) == OUTPUT_LINES
    assert ended.output[-2:] == ("20000", "last")


_CONSOLE = """
import asyncio, os, sys
from console.rollout.hooks import run_program
asyncio.run(run_program((sys.argv[1],), os.environ, 300.0))
"""


def test_a_program_does_not_outlive_a_console_that_is_killed(tmp_path: Path) -> None:
    """Else it would still move traffic while the next controller already backs it out."""
    (program,) = script(
        tmp_path, f"echo $$ > {tmp_path}/pid.new; mv {tmp_path}/pid.new {tmp_path}/pid; sleep 300; exit"
    )
    console = subprocess.Popen([sys.executable, "-c", _CONSOLE, program])
    soon((tmp_path / "pid").exists, "the program never began")
    pid = int((tmp_path / "pid").read_text())
    console.kill()
    console.wait()

    soon(lambda: not lives(pid), "the program lives")


def test_a_program_does_not_outlive_the_lease_of_a_console_that_is_stopped(tmp_path: Path) -> None:
    """It would move traffic beside the next controller's; what it changed it puts back, and says why it ended."""
    (program,) = script(
        tmp_path,
        f"trap 'echo back > {tmp_path}/back; exit 1' TERM\n"
        f"echo $$ > {tmp_path}/pid.new; mv {tmp_path}/pid.new {tmp_path}/pid; sleep 300 & wait",
    )
    quick = _CONSOLE.replace(
        "asyncio.run(", "from console.rollout import hooks; hooks.SILENT_S = 0.5; print(asyncio.run("
    )
    console = subprocess.Popen([sys.executable, "-c", f"{quick.rstrip()})", program], stdout=subprocess.PIPE, text=True)
    soon((tmp_path / "pid").exists, "the program never began")
    pid = int((tmp_path / "pid").read_text())
    console.send_signal(signal.SIGSTOP)

    soon((tmp_path / "back").exists, "the program put nothing back")
    soon(lambda: not lives(pid), "the program lives")
    console.send_signal(signal.SIGCONT)
    said = console.communicate(timeout=PATIENCE_S)[0]
    assert "ended with 1: ended, since its console was stopped or hung for 0.5 s" in said


async def test_a_program_of_a_console_at_work_may_take_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The console is heard as long as its event loop turns."""
    monkeypatch.setattr(hooks, "SILENT_S", 0.8)
    monkeypatch.setattr(hooks, "BEAT_S", 0.05)

    ended = await run_program(script(tmp_path, "sleep 2; exit 7"), os.environ, 30.0)

    assert ended.code == 7
