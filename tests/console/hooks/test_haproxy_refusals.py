"""What ``glowplug hook haproxy`` refuses, and what HAProxy and strangers refuse it."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from console.cli import run
from console.errors import HookFailed, HookRetry
from console.hooks.haproxy.admin_socket import AdminSocket
from console.hooks.haproxy.protocol import State
from tests.console.hooks.sites import SERVER, Site
from tests.console.hooks.web import Answering


def test_a_socket_without_the_level_admin_is_refused_before_anything(site: Site) -> None:
    """In a dry run as well, which is there to find it."""
    balancer = site.balancer(level="operator")
    code, said = site.hook("drain", "--dry-run", at=(balancer,))

    assert code == 1
    assert "this socket has the level operator: `stats socket … level admin` is needed to change a server\n" in said


@pytest.mark.parametrize(
    ("server", "words"),
    [("models/nobody", "the backend has no such server"), ("nothing/{node}", "HAProxy says: Can't find backend.")],
)
def test_an_unknown_name_is_said(site: Site, server: str, words: str) -> None:
    """Exit 1: no other try would find it."""
    balancer = site.balancer()
    code, said = site.hook("drain", "--socket", str(balancer.admin), "--server", server)

    assert code == 1
    assert words in said


def test_a_change_that_haproxy_refuses_is_shown_in_its_words(site: Site) -> None:
    """A static algorithm takes no weight between none and all; nothing is left half done."""
    balancer = site.balancer(algorithm="static-rr")
    code, said = site.hook("shift", "--weights", "50%,100%", at=(balancer,))

    assert code == 1
    assert "HAProxy refuses `set server models/gpu-1 weight 50`: Backend is using a static LB algorithm" in said
    assert balancer.server("gpu-1").state is State.DRAIN


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--socket", "nowhere", "--server", "b/s"), "--socket: 'nowhere' is neither a path nor HOST:PORT"),
        (("--socket", "/s", "--server", "b/s;shutdown"), "--server: 'b/s;shutdown' is not BACKEND/SERVER"),
        (("--socket", "/s", "--server", "b/s", "--weights", "0%"), "'0%' is neither 1%..100% nor 1..256"),
        (("--socket", "/s", "--server", "b/s", "--node", "../x"), "'../x': a node's name must be"),
        (("--socket", "/s", "--server", "b/s", "--rollout", ""), "--rollout (or GLOWPLUG_ROLLOUT_ID) is needed"),
    ],
)
def test_a_command_line_that_cannot_be_is_refused(
    options: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit 2 before anything is asked; no name can carry a second command."""
    monkeypatch.setenv("GLOWPLUG_ROLLOUT_NODE", "gpu-1")
    rollout = [] if "--rollout" in options else ["--rollout", "r1"]

    assert run(["hook", "haproxy", "shift", *rollout, *options]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("answer", [b"", b"admin\n", b"admin\n\n1\n# be_id be_name"])
def test_half_an_answer_is_no_answer(site: Site, answer: bytes) -> None:
    """HAProxy was ended while it spoke: exit 75."""
    half = Answering(answer)
    code, said = site.hook("drain", "--socket", f"127.0.0.1:{half.port}", *SERVER)
    half.stop()

    assert code == 75
    assert f"the answer ends in the middle, after {len(answer)} bytes: HAProxy ended or was reloaded\n" in said


def test_what_a_stranger_says_is_cleaned(site: Site) -> None:
    """Something else listens there, and would like to write on the operator's screen."""
    stranger = Answering(b"\x1b]0;owned\x07SSH-2.0-stranger\n")
    code, said = site.hook("drain", "--socket", f"127.0.0.1:{stranger.port}", *SERVER)
    stranger.stop()

    assert code == 1
    assert said.endswith("HAProxy answers `show cli level` with: SSH-2.0-stranger\n")


def test_a_socket_that_hangs_is_given_up(site: Site) -> None:
    """A process that was stopped takes the connection and says nothing; exit 75 after what an answer may take."""
    hanging = Answering(None)
    admin = AdminSocket(f"127.0.0.1:{hanging.port}", answer_s=0.1)
    with pytest.raises(HookRetry, match=r"no whole answer to `show info` within 0\.1 s"):
        admin.ask("show info")
    hanging.stop()


def test_a_socket_that_is_not_there_is_said(site: Site, tmp_path: Path) -> None:
    """HAProxy may be about to start: exit 75."""
    code, said = site.hook("drain", "--socket", str(tmp_path / "none.sock"), *SERVER)

    assert code == 75
    assert said == f"glowplug: models/gpu-1 at {tmp_path / 'none.sock'}: No such file or directory\n"


def test_a_socket_that_is_not_open_to_its_user_is_not_tried_again(tmp_path: Path) -> None:
    """Its mode stays what it is: no retry, and the settings that open it."""
    path = tmp_path / "admin.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        path.chmod(0)
        with (
            as_nobody(),
            pytest.raises(HookFailed, match=r"^Permission denied: `stats socket … user, group and mode` say") as told,
        ):
            AdminSocket(str(path)).ask("show info")

    assert not isinstance(told.value, HookRetry)


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """Have no rights of root's inside."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(before)
