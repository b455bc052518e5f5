"""Takes one sample of a gate over nodes that are warm. Whatever can't be measured is inconclusive, with the reason."""

from __future__ import annotations

import asyncio
import os
import re
import ssl
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import db.errors
from console.errors import GlowplugError
from console.fleet import Fleet
from console.rollout.gate_address import filled, is_of_each_node, needs_host
from console.rollout.hooks import RETRY_CODE, run_program
from console.rollout.measure import Sampled, judge_figure, judge_tier, request_figure, run_figure, together
from console.rollout.settings import Gate
from console.rollout.states import Verdict
from db.records import Baseline
from remote_agent.protocol.messages import VERIFY_MOST_S, Recipe, RunRecord, Tier

BY_REQUEST = ("total", "first_output")
"""What a real request measures anew; a stage is what it was in the run."""


@dataclass(frozen=True)
class Warm:
    """A node that is looked at, and the run that warmed it."""

    node: str
    run_uid: str


async def sample_gate(
    fleet: Fleet, gate: Gate, recipe: Recipe, warm: Sequence[Warm], environ: Mapping[str, str], is_first: bool
) -> Sampled:
    """Take one sample within the gate's ``timeout_s``, over nodes that ``recipe`` is warm on.

    ``is_first``: of total and first output it is the run's own.
    """
    if gate.command is not None:
        return await _by_command(gate, environ)
    if gate.http is not None and not is_of_each_node(gate.http):
        return await _by_http(gate, gate.http)
    samples = await asyncio.gather(*(_of_node(fleet, gate, recipe, one, is_first) for one in warm))
    return together({one.node: sample for one, sample in zip(warm, samples, strict=True)})


async def _of_node(fleet: Fleet, gate: Gate, recipe: Recipe, warm: Warm, is_first: bool) -> Sampled:
    if gate.http is not None:
        return await _by_own_http(fleet, gate, gate.http, warm.node)
    try:
        async with asyncio.timeout(gate.timeout_s):
            run = await fleet.find_run(warm.node, warm.run_uid, gate.timeout_s)
            if gate.tier is not None:
                return judge_tier(gate.tier, run, (await fleet.status(warm.node)).residents)
            baseline = await _baseline(fleet, warm.node, run) if gate.factor is not None else None
            measure = gate.measure or ""
            if is_first or measure not in BY_REQUEST:
                return judge_figure(measure, run_figure(gate, run, baseline))
            return await _by_request(fleet, gate, recipe, warm.node, baseline, run.tier_from)
    except TimeoutError:
        return Sampled(Verdict.INCONCLUSIVE, f"not measured within {gate.timeout_s:g} s")
    except (GlowplugError, db.errors.HistoryError) as error:
        return Sampled(Verdict.INCONCLUSIVE, str(error))


async def _baseline(fleet: Fleet, node: str, run: RunRecord) -> Baseline | None:
    await fleet.flush()  # else the run would be among those that it is compared with
    return await asyncio.to_thread(
        fleet.history.baseline,
        node,
        run.recipe_hash,
        run.tier_from.value,
        before=run.run_uid,
        armed=run.tier_to is Tier.ARMED,
    )


async def _by_request(
    fleet: Fleet, gate: Gate, recipe: Recipe, node: str, baseline: Baseline | None, tier: Tier
) -> Sampled:
    """Have the node send one real request to what is warm there: through its port, where the recipe serves."""
    timeout_s = min(gate.timeout_s, VERIFY_MOST_S)
    sample = (await fleet.verify(node, recipe.name, recipe=recipe, timeout_s=timeout_s)).samples[0]
    if sample.error is not None:
        return Sampled(Verdict.FAIL, f"the request failed: {sample.error}")
    value_ns = sample.total_ns if gate.measure == "total" else sample.first_output_ns
    return judge_figure(gate.measure or "", request_figure(gate, value_ns, baseline, tier))


async def _by_command(gate: Gate, environ: Mapping[str, str]) -> Sampled:
    """Code 0 passes; 75, or a program that can't be started, says nothing; anything else fails."""
    ended = await run_program(gate.command or (), environ, gate.timeout_s)
    values = {"output": ended.output, "tries": ended.tries, "duration_ns": ended.duration_ns}
    if ended.succeeded:
        return Sampled(Verdict.PASS, "", values)
    unknown = ended.code == RETRY_CODE or not ended.was_started
    return Sampled(Verdict.INCONCLUSIVE if unknown else Verdict.FAIL, f"the command {ended.reason}", values)


async def _by_own_http(fleet: Fleet, gate: Gate, address: str, node: str) -> Sampled:
    host = fleet.config.node(node).host
    if host is None and needs_host(address):
        return Sampled(Verdict.INCONCLUSIVE, f"{address} needs a host, and the node has none in fleet.toml")
    return await _by_http(gate, filled(address, node, host or ""))


async def _by_http(gate: Gate, url: str) -> Sampled:
    """The status alone is looked at, and a redirection is one; an address that does not answer fails."""
    try:
        async with asyncio.timeout(gate.timeout_s):
            status = await http_status(url)
    except TimeoutError:
        return Sampled(Verdict.FAIL, f"{url} did not answer within {gate.timeout_s:g} s")
    except (OSError, ValueError) as error:
        return Sampled(Verdict.FAIL, f"{url}: {_why_unanswered(error)}")
    verdict = Verdict.PASS if status == gate.status else Verdict.FAIL
    reason = "" if verdict is Verdict.PASS else f"{url} is {status}, not {gate.status}"
    return Sampled(verdict, reason, {"status": status})


def _why_unanswered(error: OSError | ValueError) -> str:
    """Say it in the system's words: asyncio's own name every address that it tried, and TLS has numbers of its own."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"TLS: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"TLS: {error.reason or error}"
    number = error.errno or 0 if isinstance(error, OSError) else 0
    return os.strerror(number) if number > 0 else str(error)


async def http_status(url: str) -> int:
    """Return the status with which a GET is answered. Ends when it is cancelled, which no thread in urllib does.

    Raises: OSError; ValueError for an answer that is not HTTP.
    """
    parts = urllib.parse.urlsplit(url)
    secure = ssl.create_default_context() if parts.scheme == "https" else None
    port = parts.port or (443 if secure else 80)
    reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=secure, limit=8192)
    try:
        path = urllib.parse.urlunsplit(("", "", parts.path or "/", parts.query, ""))
        host = parts.netloc.rpartition("@")[2]
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        await writer.drain()
        line = (await reader.readline()).decode("latin-1")
    finally:
        writer.transport.abort()
    words = line.split(None, 2)
    if len(words) < 2 or not words[0].startswith("HTTP/1.") or not re.fullmatch("[1-9][0-9]{2}", words[1]):
        raise ValueError(f"the answer is not HTTP: {line[:60]!r}")
    return int(words[1])
