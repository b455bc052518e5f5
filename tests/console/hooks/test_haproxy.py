"""``glowplug hook haproxy`` against Debian's HAProxy with HTTP servers behind it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from console.cli import hook, run
from console.cli.common import say
from console.errors import HookRetry
from console.hooks.haproxy.admin_socket import AdminSocket
from console.hooks.haproxy.protocol import State
from tests.console.hooks.web import Answering, Web
from tests.console.sshd import until
from tests.end_to_end.haproxy import HAProxy
from tests.needs import need

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


def test_a_server_that_goes_down_at_a_step_is_out_of_traffic_again(site: Site) -> None:
    """Exit 1 with HAProxy's word for it, and the state that it was in before."""
    balancer = site.balancer()
    site.hook("drain", at=(balancer,))

    def go_down() -> None:
        site.webs["gpu-1"].is_healthy = False
        until(lambda: balancer.server("gpu-1").status == "DOWN", "its checks fail")

    site.after_first_step(go_down)
    code, said = site.hook("shift", "--weights", "10%,100%", "--step-s", "0", at=(balancer,))

    assert code == 1
    assert f"models/gpu-1 at {balancer.admin}: went DOWN at weight 100%; back to drain\n" in said
    assert balancer.server("gpu-1").state is State.DRAIN


def test_errors_beyond_what_may_be_end_a_shift(site: Site) -> None:
    """Two answers of 500 are two errors, where one may be."""
    balancer = site.balancer(names=("gpu-1",))
    site.hook("drain", at=(balancer,))
    site.after_first_step(lambda: balancer.count(2, "/fail"))
    code, said = site.hook("shift", "--weights", "10%,100%", "--max-errors", "1", "--step-s", "0", at=(balancer,))

    assert code == 1
    assert "2 failed connections, broken answers and 5xx since it got traffic, at most 1 may; back to drain\n" in said
    assert balancer.server("gpu-1").state is State.DRAIN


def test_a_server_that_does_not_come_up_gets_no_traffic(site: Site) -> None:
    """Its health is asked for: what is ready is not UP."""
    balancer = site.balancer()
    site.webs["gpu-1"].is_healthy = False
    until(lambda: balancer.server("gpu-1").status == "DOWN", "its checks fail")
    code, said = site.hook("shift", "--timeout-s", "0.3", at=(balancer,))

    assert code == 1
    assert f"after 0.3 s not UP: models/gpu-1 at {balancer.admin} is DOWN; back to drain\n" in said


def test_a_dead_server_is_not_taken_for_up_as_it_leaves_maintenance(site: Site) -> None:
    """HAProxy shows ``UP 1/2`` before the first check after maintenance: no proof."""
    balancer = site.balancer()
    assert site.hook("drain", "--maint", at=(balancer,))[0] == 0
    assert balancer.server("gpu-1").status == "MAINT"
    site.webs["gpu-1"].stop()
    code, said = site.hook("ready", "--maint", "--timeout-s", "0.5", at=(balancer,))

    assert code == 1
    assert "after 0.5 s not UP: models/gpu-1" in said
    assert said.endswith("back to maint\n")


def test_a_server_without_a_check_is_taken_only_on_demand(site: Site) -> None:
    """``no check`` is nobody's word that it is up."""
    balancer = site.balancer(options="weight 100")
    code, said = site.hook("shift", at=(balancer,))

    assert code == 1
    assert "nothing checks its health: add `check`, or say --allow-unchecked\n" in said
    assert site.hook("shift", "--allow-unchecked", "--step-s", "0", at=(balancer,))[0] == 0


def test_a_share_that_comes_to_nothing_is_refused(site: Site) -> None:
    """10% of the weight 1 that a server has by default would be no traffic."""
    balancer = site.balancer(options="check")
    code, said = site.hook("shift", "--weights", "10%,100%", at=(balancer,))

    assert code == 1
    assert "10% of its weight 1 is below 1: give it `weight 100` in haproxy.cfg\n" in said


def test_a_reload_while_it_drains_is_noticed(site: Site) -> None:
    """The new process knows nothing of the drain; exit 75, and the next try drains there."""
    balancer = site.balancer()
    site.hold(balancer)
    site.when(lambda: balancer.server("gpu-1").state is State.DRAIN, balancer.reload)
    code, said = site.hook("drain", at=(balancer,))

    assert code == 75
    assert "HAProxy was reloaded (process " in said
    assert "meanwhile; it is ready, weight 100, UP" in said
    site.webs["gpu-1"].release()
    code, said = site.hook("drain", at=(balancer,))
    assert code == 0
    assert "since this rollout first asked: former sessions are not seen\n" in said


def test_a_reload_with_a_state_file_keeps_what_was_set(site: Site, tmp_path: Path) -> None:
    """As docs/haproxy.md says it is made safe."""
    saved = tmp_path / "server-state"
    balancer = site.balancer(
        global_lines=f"server-state-file {saved}", defaults_lines="load-server-state-from-file global"
    )
    site.hook("drain", at=(balancer,))
    balancer.ask("set server models/gpu-2 weight 40")
    saved.write_text(balancer.ask("show servers state"))
    balancer.reload()

    assert balancer.server("gpu-1").state is State.DRAIN
    assert balancer.server("gpu-2").weight == 40


def test_all_load_balancers_must_agree(site: Site) -> None:
    """The drain waits for the busier one, and what one of them does not know is changed at none."""
    one, other = site.balancer(), site.balancer()
    site.hold(other)
    code, said = site.hook("drain", "--timeout-s", "0", at=(one, other))

    assert code == 75
    assert f"not drained: models/gpu-1 at {other.admin} has 1 session" in said
    assert one.server("gpu-1").state is State.DRAIN
    lacking = site.balancer(names=("gpu-2",))
    site.rollout("r2")
    code, said = site.hook("shift", at=(one, lacking))
    assert code == 1
    assert f"models/gpu-1 at {lacking.admin}: the backend has no such server" in said
    assert one.server("gpu-1").state is State.DRAIN


def test_what_was_before_the_first_attempt_comes_back(site: Site) -> None:
    """Weight 40 and ready, after a crash, a second attempt and a shift that failed; a second restore does nothing."""
    balancer = site.balancer()
    balancer.ask("set server models/gpu-1 weight 40")
    for _ in range(2):
        assert site.hook("drain", at=(balancer,))[0] == 0
    site.webs["gpu-1"].stop()
    assert site.hook("shift", "--timeout-s", "0.3", at=(balancer,))[0] == 1
    code, said = site.hook("restore")

    assert code == 0
    assert f"models/gpu-1 at {balancer.admin}: ready, weight 40, " in said
    assert (balancer.server("gpu-1").state, balancer.server("gpu-1").weight) == (State.READY, 40)
    code, said = site.hook("restore")
    assert (code, said) == (0, "nothing is remembered of gpu-1 in this rollout: all stays as it is\n")


def test_a_server_of_no_traffic_is_brought_back_to_none(site: Site) -> None:
    """One that an operator had in maintenance goes there again."""
    balancer = site.balancer()
    balancer.ask("set server models/gpu-1 state maint")
    assert site.hook("ready", at=(balancer,))[0] == 0

    assert site.hook("restore")[0] == 0
    assert balancer.server("gpu-1").state is State.MAINT


def test_a_rollout_that_never_ended_does_not_make_a_drained_server_the_rule(site: Site) -> None:
    """The next rollout's abort brings back what was before the first one; but not once traffic was given again."""
    balancer = site.balancer()
    site.hook("drain", at=(balancer,))
    site.rollout("r2")
    site.hook("drain", at=(balancer,))
    site.hook("restore")
    assert balancer.server("gpu-1").state is State.READY
    site.hook("shift", "--step-s", "0", at=(balancer,))
    balancer.ask("set server models/gpu-1 state drain")
    site.rollout("r3")
    site.hook("drain", at=(balancer,))

    assert site.hook("restore")[0] == 0
    assert balancer.server("gpu-1").state is State.DRAIN


def test_a_restore_that_reaches_one_of_two_is_not_over(site: Site) -> None:
    """What can be brought back is; exit 75, and the next try finishes it."""
    one, other = site.balancer(), site.balancer()
    site.hook("drain", at=(one, other))
    hidden = one.admin.rename(one.admin.with_suffix(".away"))
    code, said = site.hook("restore")

    assert code == 75
    assert f"models/gpu-1 at {one.admin}: No such file or directory\n" in said
    assert other.server("gpu-1").state is State.READY
    hidden.rename(one.admin)
    assert site.hook("restore")[0] == 0
    assert one.server("gpu-1").state is State.READY


def test_an_agent_check_that_undoes_a_drain_is_named(site: Site) -> None:
    """The agent on the node says ``ready`` all the time, and HAProxy obeys it."""
    agent = Answering(b"ready\n")
    balancer = site.balancer(options=f"check weight 100 agent-check agent-port {agent.port} agent-inter 30ms")
    site.hold(balancer)
    code, said = site.hook("drain", at=(balancer,))
    agent.stop()
    site.webs["gpu-1"].release()

    assert code == 1
    assert "its agent-check sets that too\n" in said


def test_a_server_added_at_run_time_is_lost_at_a_reload_and_said_so(site: Site) -> None:
    """It drains as any other; afterwards nobody knows it."""
    balancer = site.balancer(names=("gpu-2",))
    balancer.ask(f"add server models/gpu-1 127.0.0.1:{site.webs['gpu-1'].port} check weight 100")
    balancer.ask("enable server models/gpu-1")
    balancer.ask("enable health models/gpu-1")
    assert site.hook("drain", at=(balancer,))[0] == 0
    balancer.reload()
    code, said = site.hook("restore")

    assert code == 1
    assert "the backend has no such server; one that was added at run time is lost at a reload\n" in said


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


def test_a_dry_run_prints_what_would_be_said_and_says_none_of_it(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the rollout's environment as from the option; nothing is remembered either."""
    balancer = site.balancer()
    monkeypatch.setenv("GLOWPLUG_ROLLOUT_DRY_RUN", "1")
    code, said = site.hook("shift", "--weights", "10%,100%", at=(balancer,))
    where = f"would say: models/gpu-1 at {balancer.admin}: set server models/gpu-1"

    assert code == 0
    assert [line for line in said.splitlines() if line.startswith("would")] == [
        f"{where} weight 10",
        f"{where} state ready",
        f"{where} weight 100",
    ]
    assert f"{where} state drain\n" in site.hook("drain", at=(balancer,))[1]
    assert balancer.server("gpu-1").state is State.READY
    assert not (tmp_path / "state" / "hooks").exists()


def test_a_dry_restore_prints_what_is_different(site: Site) -> None:
    """And leaves it so."""
    balancer = site.balancer()
    site.hook("drain", at=(balancer,))
    code, said = site.hook("restore", "--dry-run")

    assert code == 0
    assert said.endswith(f"would say: models/gpu-1 at {balancer.admin}: set server models/gpu-1 state ready\n")
    assert balancer.server("gpu-1").state is State.DRAIN


def test_machines_get_one_document(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """With --json stdout has nothing else."""
    balancer = site.balancer()
    argv = ["hook", "haproxy", "drain", "--socket", str(balancer.admin), *SERVER, "--json"]

    assert run(argv) == 0
    assert json.loads(capsys.readouterr().out) == {
        "hook": "haproxy drain",
        "node": "gpu-1",
        "dry_run": False,
        "servers": [
            {
                "socket": str(balancer.admin),
                "server": "models/gpu-1",
                "state": "drain",
                "weight": 100,
                "status": "DRAIN",
                "sessions": 0,
                "queued": 0,
            }
        ],
        "commands": [],
    }


def test_a_shift_that_is_ended_takes_the_server_out_again(site: Site, tmp_path: Path) -> None:
    """By SIGTERM in the middle of a step; over TCP, as a program of its own."""
    balancer = site.balancer()
    address = f"127.0.0.1:{balancer.admin_port}"
    argv = [sys.executable, "-m", "console", "hook", "haproxy", "shift", "--socket", address, *SERVER]
    with subprocess.Popen([*argv, "--weights", "10%"], cwd=REPOSITORY, stderr=subprocess.PIPE, text=True) as process:
        until(lambda: balancer.server("gpu-1").weight == 10, "the first step")
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=20)

    assert process.returncode == 130
    assert said.endswith("back to drain\nglowplug: ended by SIGTERM\n")
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


def test_no_request_is_lost_while_a_node_is_taken_out_and_given_back(site: Site) -> None:
    """From the drain to the last step every request is answered, and none of those while it was out by the node."""
    balancer = site.balancer()
    with balancer.traffic() as answers:
        until(lambda: len(answers.counts()) == 2, "both answer")
        assert site.hook("drain", at=(balancer,))[0] == 0
        drained = answers.counts()
        until(lambda: answers.counts()["gpu-2"] > drained["gpu-2"], "the last answer before it is counted")
        before = answers.counts()
        until(lambda: answers.counts()["gpu-2"] > before["gpu-2"] + 10, "the other goes on")
        assert answers.counts()["gpu-1"] == before["gpu-1"]
        assert site.hook("shift", "--weights", "50%,100%", "--step-s", "0", at=(balancer,))[0] == 0
        until(lambda: answers.counts()["gpu-1"] > before["gpu-1"] + 10, "the node answers again")

    assert set(answers.counts()) == {"gpu-1", "gpu-2"}


def test_the_documented_configuration_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HAProxy takes docs/haproxy.md's excerpt, and ``glowplug config check`` its rollout."""
    page = (REPOSITORY / "docs" / "haproxy.md").read_text(encoding="utf-8")
    _, haproxy, _, toml, *_ = page.split("```")
    config, fleet = tmp_path / "haproxy.cfg", tmp_path / "fleet.toml"
    config.write_text(haproxy)
    nodes = "".join(f"[nodes.gpu-{number}]\n" for number in (1, 2, 3))
    fleet.write_text(f'{nodes}[recipes.llama]\nmodel = {{ path = "/models/llama" }}\n{toml.removeprefix("toml")}')
    monkeypatch.setenv("GLOWPLUG_CONFIG", str(fleet))

    checked = subprocess.run(
        [need("haproxy", "haproxy"), "-c", "-f", str(config)], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stderr
    assert run(["config", "check"]) == 0


def test_a_reload_between_steps_takes_the_server_out_at_the_new_process(site: Site) -> None:
    """Which had it in traffic with all of its weight; exit 75."""
    balancer = site.balancer()
    site.hook("drain", at=(balancer,))
    site.after_first_step(balancer.reload)
    code, said = site.hook("shift", "--weights", "10%,100%", "--step-s", "0", at=(balancer,))

    assert code == 75
    assert "meanwhile; it is ready, weight 100, UP, 0 sessions there; back to drain\n" in said
    assert balancer.server("gpu-1").state is State.DRAIN
