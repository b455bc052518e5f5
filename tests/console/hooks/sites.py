"""A node's servers, the load balancers in front of them, and the environment of a hook, as tests have them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from console.cli import hook, run
from console.cli.common import say
from tests.console.hooks.web import Web
from tests.console.sshd import until
from tests.end_to_end.haproxy import HAProxy

REPOSITORY = Path(__file__).parents[3]


SERVER = ("--server", "models/{node}")


class Site:
    """Two web servers, as many load balancers as a test asks for, and the environment of a hook for gpu-1."""

    def __init__(self, stack: ExitStack, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._stack, self._monkeypatch, self._capsys = stack, monkeypatch, capsys
        self.webs = {name: Web(name) for name in ("gpu-1", "gpu-2")}
        for web in self.webs.values():
            stack.callback(web.stop)
        monkeypatch.setattr(hook, "say", self._say)
        self._after_step: Callable[[], object] | None = None
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
        self._stack.callback(self.webs["gpu-1"].release)
        until(lambda: balancer.server("gpu-1").sessions == 1, "the request is at gpu-1")
        balancer.ask("set server models/gpu-2 state ready")

    def after_first_step(self, action: Callable[[], object]) -> None:
        """Do something once a hook has held its first step, before it takes the next."""
        self._after_step = action

    def _say(self, text: str) -> None:
        say(text)
        if text.startswith("weight") and self._after_step is not None:
            self._after_step()
            self._after_step = None

    def when(self, condition: Callable[[], bool], action: Callable[[], object]) -> None:
        """Do something beside a hook as soon as ``condition`` holds."""

        def work() -> None:
            until(condition, "what the test waits for beside a hook")
            action()

        thread = threading.Thread(target=work)
        thread.start()
        self._stack.callback(thread.join)
