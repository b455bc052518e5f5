"""A run that serves, on this host with real processes: the example server, its port, its end, and what verify finds."""

from __future__ import annotations

import http.client
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from remote_agent.errors import RefusedError
from remote_agent.protocol.messages import (
    Empty,
    Event,
    Finding,
    ReadyRequest,
    ReleaseParams,
    ReleaseResult,
    ResidentListResult,
    RunRecord,
    RunResult,
    RunState,
    RunUidParams,
    Server,
    ServeStopParams,
    ServeStopResult,
    StageStatus,
    SubscribeParams,
    SubscribeResult,
    Tier,
    VerifyParams,
    VerifyResult,
)
from tests.remote_agent.agentd.agents import Watcher, eventually, failure_of, is_running, parts_sum_to_wall, stage_of
from tests.remote_agent.pipeline.models import load_with_transformers
from tests.remote_agent.serving import EXAMPLES, NEW_TOKENS, PROMPT_TOKENS, Host, is_open, serve_of

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    host = Host(tmp_path_factory.mktemp("host"))
    yield host
    host.agent("stop", "--force", "--keeper")


@pytest.fixture
def client(host: Host) -> Iterator[Watcher]:
    """A client of the host's agent, on which nothing is warm afterwards."""
    with host.start() as client:
        yield client
        client.call("resident.release", ReleaseParams(everything=True), ReleaseResult)


def post(port: int, **body: Any) -> Any:
    """Return what the example server answers to a completion's request."""
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    link.request("POST", "/v1/completions", json.dumps(body))
    content = json.loads(link.getresponse().read())
    link.close()
    return content


def servers(client: Watcher) -> list[Server]:
    return [server for one in client.status().residents for server in one.servers]


def finding(client: Watcher, code: str) -> str:
    """Return the text of the next finding of that code."""

    def is_it(event: Event) -> bool:
        return isinstance(event.data, Finding) and event.data.code == code

    data = client.next_event(is_it).data
    assert isinstance(data, Finding)
    return data.text


def expected_tokens(model: Path, count: int = NEW_TOKENS) -> str:
    """Return what transformers' own load of the checkpoint generates for the recipe's prompt."""
    import torch

    ids = torch.arange(PROMPT_TOKENS)[None]
    asked = {"attention_mask": torch.ones_like(ids), "max_new_tokens": count, "do_sample": False}
    made = load_with_transformers(model).generate(ids, **asked)
    return " ".join(map(str, made[0, PROMPT_TOKENS:].tolist()))


def verify(client: Watcher, model: str, count: int = 2) -> VerifyResult:
    return client.call("verify", VerifyParams(model, count, 0.01), VerifyResult)


def test_a_run_serves_what_it_made_warm(host: Host, client: Watcher) -> None:
    """Its last stage is a completion through the port, with transformers' own tokens; a release closes the port."""
    params = host.params(tier="standby", health="/health")  # no keeper runs yet: it is wanted for the server's sake
    port = serve_of(params).port
    run = client.warm(params)
    assert (run.state, run.tier_to) == (RunState.READY, Tier.STANDBY), run
    wanted = expected_tokens(host.model)
    listening = stage_of(run, "listening")
    assert run.stages[-1] == listening
    assert (listening.path, listening.extra["answer"]) == (f"127.0.0.1:{port}", wanted)
    assert parts_sum_to_wall(run)

    answer = post(port, prompt=list(range(PROMPT_TOKENS)), max_tokens=NEW_TOKENS)
    assert answer["choices"][0]["text"] == run.output == wanted
    (server,) = servers(client)
    assert (server.pid, server.port, server.run_uid) == (listening.extra["pid"], port, run.run_uid)
    assert attached(client) == 1

    released = client.call("resident.release", ReleaseParams(run.run_uid), ReleaseResult).released
    assert [one.run_uid for one in released] == [run.run_uid]
    assert not is_open(port)
    assert not is_running(server.pid)
    assert client.status().residents == ()


def test_a_server_that_dies_is_told_and_its_model_stays(host: Host, client: Watcher) -> None:
    """With how it died; what it served is warm still, and the next run serves it again."""
    params = host.params()
    run = client.warm(params)
    assert (run.state, run.tier_to) == (RunState.READY, Tier.RESIDENT), run
    (server,) = servers(client)
    os.kill(server.pid, signal.SIGKILL)

    text = finding(client, "server_died")
    assert text.startswith(
        f"the server of tiny on 127.0.0.1:{server.port} (process {server.pid}) died: killed (SIGKILL)"
    )
    assert servers(client) == []
    assert [one.tier for one in client.status().residents] == [Tier.RESIDENT]
    again = client.warm(host.params())
    assert (again.state, again.tier_from) == (RunState.READY, Tier.RESIDENT)


def test_a_second_run_of_the_recipe_replaces_its_server(host: Host, client: Watcher) -> None:
    """The old one has stopped before the new one answers on the same port; another recipe's server is left alone."""
    first, other = host.params(), host.params("other")
    client.warm(first)
    client.warm(other)
    before = {one.recipe: one.pid for one in servers(client)}
    again = client.warm(host.params(port=serve_of(first).port))

    assert stage_of(again, "listening").reason == f"in place of process {before['tiny']}"
    after = {one.recipe: one.pid for one in servers(client)}
    assert after["other"] == before["other"]
    assert after["tiny"] != before["tiny"]
    assert not is_running(before["tiny"])
    taken = client.warm(host.params("third", port=serve_of(other).port))
    assert failure_of(taken).detail == f"nothing can listen on 127.0.0.1:{serve_of(other).port}: Address already in use"
    assert is_open(serve_of(other).port)


def test_verify_asks_what_is_ready(host: Host, client: Watcher) -> None:
    """Through the port while there is a server, then the standby itself, then a process attached to the resident."""
    wanted = expected_tokens(host.model)
    run = client.warm(host.params(tier="standby"))
    assert run.state is RunState.READY, run.failure
    for way, tier, then in (
        ("port", Tier.STANDBY, "stop"),
        ("standby", Tier.STANDBY, "end"),
        ("attached", Tier.RESIDENT, ""),
    ):
        found = verify(client, str(host.model))
        assert (found.way, found.tier, found.run_uid) == (way, tier, run.run_uid)
        assert [(one.output, one.error) for one in found.samples] == [(wanted, None)] * 2
        assert all(0 < (one.first_output_ns or 0) <= (one.total_ns or 0) for one in found.samples)
        if then == "stop":
            assert len(client.call("serve.stop", ServeStopParams("tiny"), ServeStopResult).stopped) == 1
            with pytest.raises(
                RefusedError, match=r"tiny is not ready on this node: nothing serves it on 127\.0\.0\.1:\d+"
            ):
                verify(client, "tiny")
        elif then:
            os.kill(client.worker_pid(), signal.SIGKILL)
            eventually(lambda: client.status().residents[0].tier is Tier.RESIDENT, "the keeper alone has it")
    eventually(lambda: not attached(client), "the process that was attached has ended")


def test_the_verbs_ask_and_stop_what_serves(host: Host, client: Watcher) -> None:
    """status names the address, verify its samples, serve stop what has ended; then neither finds anything."""
    params = host.params()
    client.warm(params)
    serve = serve_of(params)
    asked = host.glowplug(params, "verify", "x", "--recipe", "tiny", "--count", "2", "--interval", "0", "--json")
    assert asked.returncode == 0, asked.stderr
    (node,) = json.loads(asked.stdout)["nodes"]
    assert (node["tier"], node["way"], node["run_uid"]) == ("resident", "port", params.run_uid)
    assert [one["error"] for one in node["samples"]] == [None, None]
    status = host.glowplug(params, "status", "x")
    assert f"serves on {serve.address} (pid {servers(client)[0].pid})" in status.stdout
    stopped = host.glowplug(params, "serve", "stop", "x", "--recipe", "tiny")
    assert (stopped.returncode, serve.address in stopped.stdout, is_open(serve.port)) == (0, True, False)

    again = host.glowplug(params, "serve", "stop", "x")
    assert (again.returncode, "nothing serves on this node" in again.stdout) == (1, True)
    client.warm(elsewhere := host.params())
    moved = host.glowplug(params, "verify", "x", "--recipe", "tiny")
    words = f"it is served on {serve_of(elsewhere).address}, and the recipe names {serve.address}"
    assert (moved.returncode, words in moved.stdout) == (1, True)
    client.call("serve.stop", ServeStopParams(), ServeStopResult)
    unserved = host.glowplug(params, "verify", "x", "--recipe", "tiny")
    assert (unserved.returncode, f"nothing serves it on {serve.address}" in unserved.stdout) == (1, True)


def test_a_run_that_is_called_off_while_its_server_starts_leaves_none(host: Host, client: Watcher) -> None:
    """The process that never listens ends with the run, long before the time that it would have had."""
    params = host.params(path=str(host.folder), entry="bad_servers:waits")
    client.begin(params)
    client.stage(params.run_uid, "listening")
    eventually(lambda: attached(client), "its process attaches")
    run = client.call("run.cancel", RunUidParams(params.run_uid), RunResult).run

    assert (run.state, stage_of(run, "listening").status) == (RunState.CANCELLED, StageStatus.FAILED)
    eventually(lambda: not attached(client), "its process has ended")
    assert [one.tier for one in client.status().residents] == [Tier.RESIDENT]


def test_a_forced_release_takes_a_server_along_that_only_starts(host: Host, client: Watcher) -> None:
    """It would serve what is warm no more, and no status would show it: its run fails, and says why."""
    params = host.params(path=str(host.folder), entry="bad_servers:waits")
    client.begin(params)
    client.stage(params.run_uid, "listening")
    eventually(lambda: attached(client), "its process attaches")
    client.call("resident.release", ReleaseParams(everything=True, force=True), ReleaseResult)

    failure = failure_of(client.finished(params.run_uid))
    assert (failure.code, failure.stage) == ("server_stopped", "listening")
    assert failure.detail == "the server was stopped while it started: released by request"
    eventually(lambda: not attached(client), "its process has ended")


def attached(client: Watcher) -> int:
    """Return how many processes have something attached, as the keeper says now."""
    return sum(one.attached for one in client.call("resident.list", Empty(), ResidentListResult).residents)


UNREADY: tuple[tuple[dict[str, Any], str, str], ...] = (
    ({"entry": "no_such:serve"}, "entry_unusable", "ModuleNotFoundError: No module named 'no_such'"),
    ({"entry": "bad_servers:returns"}, "entry_returned", "returned after 0.0 s, and nothing had told it to stop"),
    ({"entry": "bad_servers:raises"}, "entry_failed", "raised after 0.0 s: RuntimeError: no more workers"),
    (
        {"entry": "bad_servers:waits", "ready_timeout_s": 0.5},
        "not_ready_in_time",
        "no completion from {address}/v1/completions within 0.5 s: {address}/v1/completions: Connection refused",
    ),
    (
        {"entry": "bad_servers:accepts", "ready_timeout_s": 0.5},
        "not_ready_in_time",
        "{address}/v1/completions did not answer in time, after ",
    ),
    (
        {"entry": "bad_servers:empty", "health": "/health", "ready_timeout_s": 0.5},
        "not_ready_in_time",
        "within 0.5 s: {address}/health answered 503: ",
    ),
    (
        {"entry": "bad_servers:empty"},
        "no_completion",
        "{address}/v1/completions answered 200 with an empty completion, 27 bytes",
    ),
    ({"request": ReadyRequest("/v2")}, "no_completion", "{address}/v2 answered 404: "),
)


@pytest.mark.parametrize(("serve", "code", "detail"), UNREADY)
def test_what_keeps_a_server_from_being_ready_is_one_line(
    host: Host, client: Watcher, serve: dict[str, Any], code: str, detail: str
) -> None:
    """The thing and the number; nothing is left of the server, and what was made warm stays so."""
    params = host.params(**{"path": str(host.folder), **({} if "entry" in serve else {"path": str(EXAMPLES)}), **serve})
    run: RunRecord = client.warm(params)

    failure = failure_of(run)
    assert (run.state, failure.code, failure.stage) == (RunState.FAILED, code, "listening")
    assert detail.format(address=serve_of(params).address) in failure.detail
    assert "\n" not in failure.detail
    assert [(one.tier, one.servers) for one in client.status().residents] == [(Tier.RESIDENT, ())]
    assert not is_open(serve_of(params).port)


def test_a_server_ends_with_its_agent(host: Host) -> None:
    """Killed, the agent takes it along; the next agent says so, and has the model still. A stop in order is refused."""
    with host.start() as client:
        params = host.params()
        run = client.warm(params)
        (server,) = servers(client)
        refused = host.agent("stop")
        assert refused.returncode == 1
        assert f"still here: the server of tiny on 127.0.0.1:{server.port} (process {server.pid})" in refused.stderr
        os.kill(client.greeting.pid, signal.SIGKILL)
    eventually(lambda: not is_running(server.pid) and not is_open(server.port), "the server ends")
    with host.start() as client:
        client.call("subscribe", SubscribeParams("", 0, samples=False), SubscribeResult)
        assert "ended with its agent" in finding(client, "server_ended")
        (resident,) = client.status().residents
        assert (resident.run_uid, resident.servers) == (run.run_uid, ())
        client.call("resident.release", ReleaseParams(everything=True), ReleaseResult)


@pytest.mark.gpu
def test_a_gpu_s_resident_is_served_the_same_way(host: Host, client: Watcher) -> None:
    """Attached, answered through the port with the tokens that the run itself gave, and closed by a release."""
    params = host.params("gpu", devices=("cuda:0",))
    run = client.warm(params)
    assert run.state is RunState.READY, run.failure
    assert stage_of(run, "listening").extra["answer"] == run.output
    assert (stage_of(run, "init").extra["forked"], stage_of(run, "listening").reason) == (True, None)
    again = client.warm(host.params("gpu", tier="standby", devices=("cuda:0",)))
    assert (again.state, again.tier_from) == (RunState.READY, Tier.RESIDENT), again
    assert [one.error for one in verify(client, "gpu").samples] == [None, None]
    client.call("serve.stop", ServeStopParams(), ServeStopResult)
    assert verify(client, str(host.model)).way == "standby"
    client.call("resident.release", ReleaseParams(everything=True), ReleaseResult)
    assert not is_open(serve_of(params).port)
