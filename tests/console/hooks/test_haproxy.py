"""``glowplug hook haproxy`` against Debian's HAProxy with HTTP servers behind it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from console.cli import run
from console.hooks.haproxy.protocol import State
from tests.console.hooks.web import Web
from tests.console.sshd import until
from tests.end_to_end.haproxy import HAProxy

SERVER = ("--server", "models/{node}")


class Site:
    """Two web servers, as many load balancers as a test asks for, and the environment of a hook for gpu-1."""

    def __init__(self, stack: ExitStack, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._stack, self._monkeypatch, self._capsys = stack, monkeypatch, capsys
        self.webs = {name: Web(name) for name in ("gpu-1", "gpu-2")}
        for web in self.webs.values():
            stack.callback(web.stop)
        self.rollout("r1")
        monkeypatch.setenv("GLOWPLUG_ROLLOUT_NODE", "gpu-1")

    def rollout(self, rollout: str) -> None:
        self._monkeypatch.setenv("GLOWPLUG_ROLLOUT_ID", rollout)

    def balancer(self, **settings: Any) -> HAProxy:
        names = settings.pop("names", tuple(self.webs))
        balancer = HAProxy({name: self.webs[name].port for name in names}, **settings)
        self._stack.callback(balancer.stop)
        return balancer.start()

    def hook(self, word: str, *options: str, at: tuple[HAProxy, ...] = ()) -> tuple[int, str]:
        """Return the exit code of a word and all that it printed."""
        sockets = [part for one in at for part in ("--socket", str(one.admin))]
        code = run(["hook", "haproxy", word, *sockets, *(SERVER if at else ()), *options])
        said = self._capsys.readouterr()
        return code, said.out + said.err

    def hold(self, balancer: HAProxy) -> None:
        """Have a request wait at gpu-1, which alone is in traffic meanwhile."""
        balancer.ask("set server models/gpu-2 state maint")
        client = threading.Thread(target=balancer.get, args=("/hold",))
        client.start()
        self._stack.callback(client.join)
        until(lambda: balancer.server("gpu-1").sessions == 1, "the request is at gpu-1")
        balancer.ask("set server models/gpu-2 state ready")

    def when(self, condition: Callable[[], bool], action: Callable[[], object]) -> None:
        """Do something beside a hook as soon as ``condition`` holds."""

        def work() -> None:
            until(condition, "what the test waits for beside a hook")
            action()

        thread = threading.Thread(target=work)
        thread.start()
        self._stack.callback(thread.join)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Site]:
    monkeypatch.setenv("GLOWPLUG_STATE", str(tmp_path / "state"))
    with ExitStack() as stack:
        yield Site(stack, monkeypatch, capsys)


def test_a_drain_waits_for_the_last_request_and_lets_no_other_in(site: Site) -> None:
    """It ends once the held request is answered; what comes meanwhile goes elsewhere."""
    balancer = site.balancer()
    site.hold(balancer)
    site.when(lambda: balancer.server("gpu-1").state is State.DRAIN, site.webs["gpu-1"].release)
    code, said = site.hook("drain", at=(balancer,))

    assert code == 0
    assert f"models/gpu-1 at {balancer.admin}: drain, weight 100, DRAIN, 0 sessions\n" in said
    assert balancer.count(10) == {"gpu-2": 10}


def test_a_drain_that_runs_out_of_time_says_what_is_left_and_may_be_tried_again(site: Site) -> None:
    """Exit 75 with the number of sessions; the server stays out of traffic."""
    balancer = site.balancer()
    site.hold(balancer)
    code, said = site.hook("drain", "--timeout-s", "0", at=(balancer,))

    assert code == 75
    assert f"after 0 s not drained: models/gpu-1 at {balancer.admin} has 1 session, 0 queued\n" in said
    site.webs["gpu-1"].release()
    assert site.hook("drain", at=(balancer,))[0] == 0


def test_force_ends_what_is_left(site: Site) -> None:
    """The session is cut off, and the drain is over."""
    balancer = site.balancer()
    site.hold(balancer)
    code, said = site.hook("drain", "--timeout-s", "0", "--force", at=(balancer,))

    assert code == 0
    assert "1 session, 0 queued; they are ended\n" in said
    assert balancer.server("gpu-1").sessions == 0


def test_traffic_comes_back_in_steps_of_weight(site: Site) -> None:
    """Each step is read back, and a server gets its share of requests at the first as at the last."""
    balancer = site.balancer()
    site.hook("drain", at=(balancer,))
    code, said = site.hook("shift", "--weights", "25%,50%", "--step-s", "0", at=(balancer,))
    half = balancer.count(30)

    assert code == 0
    assert said.index("weight 25%: ") < said.index("ready, weight 25, UP") < said.index("weight 50%: ")
    assert 9 <= half["gpu-1"] <= 11
    assert site.hook("shift", "--step-s", "0", at=(balancer,))[0] == 0
    assert 9 <= balancer.count(20)["gpu-1"] <= 11
