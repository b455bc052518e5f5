"""Gates measured on a fleet of fake hosts, by real programs and by a real HTTP server."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from console.errors import RequestRefused
from console.fleet import Fleet
from console.rollout.measure import Figure, Sampled, judge_figure, together
from console.rollout.samples import Warm, sample_gate
from console.rollout.settings import Gate
from console.rollout.states import Verdict
from remote_agent.protocol.messages import Tier, VerifyParams, VerifyResult, VerifySample
from tests.console.fake_host import FakeHost
from tests.console.fleet_world import World

WARM = (Warm("n1", "run-00000001"),)
PASS, FAIL, INCONCLUSIVE = Verdict.PASS, Verdict.FAIL, Verdict.INCONCLUSIVE


class Measured:
    """A fleet where n1 has been warmed by one run: 100 ns in all, 60 ns of them ``weights``."""

    def __init__(self, fleet: Fleet, world: World) -> None:
        self.fleet = fleet
        self.host: FakeHost = world.hosts["n1"]
        self.world = world
        self.recipe = fleet.config.recipes["llama"]

    async def warm(self, node: str = "n1", uid: str = "run-00000001") -> None:
        await self.fleet.warm(node, "llama", run_uid=uid)
        self.world.hosts[node].finish(uid)

    async def sample(self, is_first: bool = True, **gate: object) -> tuple[Verdict, str]:
        sampled = await self.whole(is_first, **gate)
        return sampled.verdict, sampled.reason

    async def whole(self, is_first: bool = True, warm: tuple[Warm, ...] = WARM, **gate: object) -> Sampled:
        return await sample_gate(self.fleet, Gate(**gate), self.recipe, warm, os.environ, is_first)  # type: ignore[arg-type]


@pytest.fixture
async def measured(tmp_path: Path) -> AsyncIterator[Measured]:
    world = World(tmp_path)
    async with world.fleet() as fleet:
        yield Measured(fleet, world)


class Answers:
    """What the host answers to ``verify``, one after another; None is an agent that does not know the word."""

    def __init__(self, host: FakeHost) -> None:
        self.next: list[VerifySample | None] = []
        self.asked: list[VerifyParams] = []
        self._usual = host.answer

    def __call__(self, method: str, params: object) -> object:
        if not isinstance(params, VerifyParams):
            return self._usual(method, params)
        self.asked.append(params)
        sample = self.next.pop(0)
        if sample is None:
            raise RequestRefused("method_not_found", "no such method")
        return VerifyResult((sample,), Tier.STANDBY, "run-00000001", "standby")


@pytest.fixture
def answers(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> Answers:
    found = Answers(measured.host)
    monkeypatch.setattr(measured.host, "answer", found)
    return found


async def test_a_runs_figure_passes_at_its_limit_and_fails_over_it(measured: Measured) -> None:
    """Total, first output and any stage; the reason has both numbers."""
    await measured.warm()

    assert await measured.sample(measure="total", limit_s=1e-7) == (PASS, "n1: 0.0 ms, within 0.0 ms")
    assert await measured.sample(measure="first_output", limit_s=1.0) == (PASS, "n1: 0.0 ms, within 1.00 s")
    assert await measured.sample(measure="weights", limit_s=6e-8) == (PASS, "n1: 0.0 ms, within 0.0 ms")
    assert await measured.sample(measure="total", limit_s=1e-9) == (FAIL, "n1: total 0.0 ms, over 0.0 ms")


def test_a_pass_of_several_nodes_says_the_figure_nearest_to_its_limit() -> None:
    """Each node may have a limit of its own; what passed without a figure says nothing."""
    a = judge_figure("total", Figure(90_000_000, 95_000_000))
    b = judge_figure("total", Figure(400_000_000, 900_000_000))

    assert together({"a": a, "b": b, "c": Sampled(PASS)}).reason == "a: 90 ms, within 95 ms"
    assert together({"c": Sampled(PASS)}).reason == ""


async def test_what_the_run_does_not_have_is_inconclusive(measured: Measured) -> None:
    """A stage that was skipped has no time, and is no pass."""
    await measured.warm()

    assert await measured.sample(measure="hold", limit_s=1.0) == (INCONCLUSIVE, "n1: the run has no hold")


async def test_a_factor_is_of_the_nodes_own_earlier_runs(measured: Measured) -> None:
    """The run itself is none of them; without any there is nothing to compare with."""
    await measured.warm()
    first = await measured.sample(measure="total", factor=1.5)
    await measured.warm(uid="run-00000002")
    second = await measured.whole(warm=(Warm("n1", "run-00000002"),), measure="total", factor=1.5)

    assert first == (INCONCLUSIVE, "n1: history has no total of a run from cold to compare with")
    assert second == Sampled(
        PASS, "n1: 0.0 ms, within 0.0 ms", {"n1": {"verdict": "pass", "value_ns": 100, "limit_ns": 150}}
    )


async def test_of_several_nodes_one_that_fails_fails_the_sample(measured: Measured) -> None:
    """And one that can't be measured makes it inconclusive where none fails."""
    await measured.warm()
    await measured.warm("n2", "run-00000002")
    measured.world.hosts["n2"].runs["run-00000002"] = replace(
        measured.world.hosts["n2"].runs["run-00000002"], wall_ns=900
    )
    both = (*WARM, Warm("n2", "run-00000002"))
    failed = await measured.whole(warm=both, measure="total", limit_s=5e-7)
    unknown = await measured.whole(warm=(*WARM, Warm("n2", "run-00000009")), measure="total", limit_s=5e-7)

    assert (failed.verdict, failed.reason) == (FAIL, "n2: total 0.0 ms, over 0.0 ms")
    assert failed.values["n1"] == {"verdict": "pass", "value_ns": 100, "limit_ns": 500}
    assert (unknown.verdict, unknown.reason) == (INCONCLUSIVE, "n2: no run run-00000009")


async def test_a_tier_is_reached_or_a_warmer_one_and_still_held(measured: Measured) -> None:
    """What was let go since is no tier."""
    await measured.warm()

    assert await measured.sample(tier="resident") == (PASS, "")
    assert await measured.sample(tier="standby") == (PASS, "")
    measured.host.residents = [replace(one, tier=Tier.RESIDENT) for one in measured.host.residents]
    assert await measured.sample(tier="resident") == (PASS, "")
    assert await measured.sample(tier="standby") == (FAIL, "n1: was standby, and is not warm any more")
    measured.host.runs["run-00000001"] = replace(measured.host.runs["run-00000001"], tier_to=Tier.CACHED)
    assert await measured.sample(tier="standby") == (FAIL, "n1: tier cached, not standby")
    assert await measured.sample(tier="cached") == (PASS, "")


async def test_a_node_that_is_out_of_reach_is_inconclusive(measured: Measured) -> None:
    """A lost link says nothing about what is warm."""
    await measured.warm()
    measured.world.links["n1"].lose("no route to host", failures=5, final=True)
    verdict, reason = await measured.sample(tier="standby")

    assert (verdict, "no route to host" in reason) == (INCONCLUSIVE, True)


async def test_later_samples_are_real_requests_but_of_a_stage(measured: Measured, answers: Answers) -> None:
    """Of a stage there is none: it is what it was."""
    await measured.warm()

    assert await measured.sample(False, measure="weights", limit_s=1.0) == (PASS, "n1: 0.0 ms, within 1.00 s")
    assert answers.asked == []


async def test_a_request_that_verify_sends_is_measured(measured: Measured, answers: Answers) -> None:
    """By its own time, or by the median of the runs' own requests; one that failed fails the sample."""
    await measured.warm()
    good = VerifySample(1, 400, 900, "7")
    answers.next = [good, good, replace(good, error="out of memory"), replace(good, first_output_ns=None), None, good]

    assert await measured.sample(False, measure="first_output", limit_s=5e-7) == (PASS, "n1: 0.0 ms, within 0.0 ms")
    assert await measured.sample(False, measure="total", limit_s=5e-7) == (FAIL, "n1: total 0.0 ms, over 0.0 ms")
    assert await measured.sample(False, measure="total", limit_s=1) == (FAIL, "n1: the request failed: out of memory")
    missing = await measured.sample(False, measure="first_output", limit_s=1)
    assert missing == (INCONCLUSIVE, "n1: the request has no first_output")
    assert await measured.sample(False, measure="total", limit_s=1) == (INCONCLUSIVE, "n1: no such method")
    compared = await measured.sample(False, measure="total", factor=2.0)
    assert compared == (INCONCLUSIVE, "n1: history has no total of a run from cold to compare with")
    assert all((one.model, one.count, one.recipe) == ("llama", 1, measured.recipe) for one in answers.asked)


@pytest.mark.parametrize(("timeout_s", "asked_s"), [(10.0, 10.0), (120.0, 120.0), (7200.0, 600.0)])
async def test_a_request_has_its_gates_time(
    measured: Measured, answers: Answers, timeout_s: float, asked_s: float
) -> None:
    """As far as the agent gives a request any; so none goes on there that nobody waits for."""
    await measured.warm()
    answers.next = [VerifySample(1, 400, 900, "7")]
    await measured.sample(False, measure="total", limit_s=1, timeout_s=timeout_s)

    assert [one.timeout_s for one in answers.asked] == [asked_s]


def program(folder: Path, text: str) -> tuple[str, ...]:
    path = folder / "gate"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return (str(path),)


async def test_a_command_passes_fails_or_says_nothing(measured: Measured, tmp_path: Path) -> None:
    """75 says nothing, nor does what can't be started; what takes too long fails."""
    assert await measured.sample(command=program(tmp_path, "exit 0")) == (PASS, "")
    failed = await measured.sample(command=program(tmp_path, "echo p99 is 3 s; exit 1"))
    assert failed == (FAIL, "the command ended with 1: p99 is 3 s")
    assert (await measured.sample(command=program(tmp_path, "exit 75"), timeout_s=0.5))[0] is INCONCLUSIVE
    assert (await measured.sample(command=("/nowhere/gate",)))[0] is INCONCLUSIVE
    assert (await measured.sample(command=program(tmp_path, "exec sleep 60"), timeout_s=0.2))[0] is FAIL


Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def served(answer: Answer) -> AsyncIterator[str]:
    """Yield the address of a server that answers so; afterwards each of its connections is over."""
    answering: list[tuple[asyncio.Task[None], asyncio.StreamWriter]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await answer(reader, writer)

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answering.append((asyncio.ensure_future(serve(reader, writer)), writer))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/health?deep=1"
    finally:
        server.close()
        for task, writer in answering:
            task.cancel()
            await asyncio.wait({task})
            writer.close()
            await asyncio.gather(writer.wait_closed(), return_exceptions=True)
        await server.wait_closed()


def saying(status: bytes, requests: list[bytes]) -> Answer:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(status)
        await writer.drain()
        writer.close()

    return answer


async def test_an_address_passes_by_its_status_alone(measured: Measured) -> None:
    """A redirection is followed by nobody."""
    requests: list[bytes] = []
    async with served(saying(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", requests)) as url:
        assert await measured.sample(http=url) == (PASS, "")
        assert await measured.sample(http=url, status=204) == (FAIL, f"{url} is 200, not 204")
    async with served(saying(b"HTTP/1.1 302 Found\r\nlocation: /\r\n\r\n", [])) as url:
        assert await measured.sample(http=url) == (FAIL, f"{url} is 302, not 200")
    for nonsense in (b"\x1b]52;c;AAAA\x07 nonsense\r\n", b"HTTP/1.1 " + b"9" * 5000 + b" OK\r\n"):
        async with served(saying(nonsense, [])) as url:
            verdict, reason = await measured.sample(http=url)
        assert verdict is FAIL
        assert reason.startswith(f"{url}: the answer is not HTTP: ")

    assert requests[0].startswith(b"GET /health?deep=1 HTTP/1.1\r\nHost: 127.0.0.1:")


async def test_an_address_with_placeholders_is_each_nodes_own(tmp_path: Path) -> None:
    """Filled with its name and its host; of several, the one that does not hold is named."""
    world, requests = World(tmp_path), list[bytes]()
    hosts = {"n1": "127.0.0.1", "n2": "::1", "n3": None}
    nodes = tuple(replace(node, host=hosts[node.name]) for node in world.config.nodes)
    world.config = replace(world.config, nodes=nodes)
    both = (*WARM, Warm("n2", "run-00000002"))
    async with world.fleet() as fleet, served(saying(b"HTTP/1.1 200 OK\r\n\r\n", requests)) as url:
        measured = Measured(fleet, world)
        port = url.split(":")[2].split("/")[0]
        by_name = await measured.whole(warm=both, http=f"http://127.0.0.1:{port}/of/{{node}}")
        by_host = await measured.sample(http=f"http://{{host}}:{port}/")
        by_six = await measured.whole(warm=(Warm("n2", "run-00000002"),), http=f"http://{{host}}:{port}/")
        hostless = await measured.whole(warm=(Warm("n3", "run-00000003"),), http="http://{host}/")

    assert by_name.values == {name: {"verdict": "pass", "status": 200} for name in ("n1", "n2")}
    assert {request.split()[1] for request in requests} == {b"/of/n1", b"/of/n2", b"/"}
    assert by_host == (PASS, "")
    assert by_six.reason.startswith(f"n2: http://[::1]:{port}/: ")
    assert (hostless.verdict, hostless.reason) == (
        INCONCLUSIVE,
        "n3: http://{host}/ needs a host, and the node has none in fleet.toml",
    )


async def test_an_address_without_tls_is_said_to_have_none(measured: Measured) -> None:
    """In words of TLS: its error numbers are not the system's."""

    async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()

    async with served(plain) as url:
        secure = url.replace("http:", "https:")
        verdict, reason = await measured.sample(http=secure)

    assert verdict is FAIL
    assert reason.startswith(f"{secure}: TLS: ")


async def test_an_address_that_does_not_answer_in_time_fails(measured: Measured) -> None:
    """Drop by drop is not in time either, and nothing of it stays behind."""

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(b"H")
            await writer.drain()
            await asyncio.sleep(0.02)

    async with served(drip) as url:
        assert await measured.sample(http=url, timeout_s=0.3) == (FAIL, f"{url} did not answer within 0.3 s")
    assert await measured.sample(http=url) == (FAIL, f"{url}: Connection refused")
