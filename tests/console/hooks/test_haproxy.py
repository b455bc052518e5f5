"""``glowplug hook haproxy`` against Debian's HAProxy with HTTP servers behind it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from console.cli import run
from console.hooks.haproxy.protocol import State
from tests.console.hooks.sites import REPOSITORY, SERVER, Site
from tests.console.hooks.web import Answering
from tests.console.sshd import until
from tests.needs import need


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
