"""Keeps one sampler running and its newest report. A driver that hangs takes the sampler with it, never the agent."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from remote_agent.agentd import hostfacts
from remote_agent.agentd.channel import Channel
from remote_agent.agentd.commands import Commands
from remote_agent.agentd.reaper import Child, Reaper
from remote_agent.agentd.timeline import Figure, Figures
from remote_agent.agentd.waiting import within
from remote_agent.protocol.internal import InternalMessage, SamplerReport
from remote_agent.protocol.messages import Finding

log = logging.getLogger(__name__)

FRESH_LOOK_S = 2.0
"""How long whoever counts on free memory waits for a look at the GPUs after a load; there are two looks a second."""

Status = Literal["nvml", "absent", "hung", "starting", "failed"]

_REASONS = {
    "absent": "no NVIDIA driver: CPU only",
    "starting": "the sampler has not reported yet",
    "hung": "the driver does not answer",
    "failed": "the sampler fails",
}


@dataclass(frozen=True)
class SamplerTimes:
    """``first_report_s`` is long: without persistence mode the driver sets up every GPU first."""

    first_report_s: float = 60.0
    report_s: float = 5.0
    check_s: float = 0.5
    backoff_s: float = 1.0
    backoff_max_s: float = 60.0


class Sampler:
    """Supervises the sampler process; `report` is what it said last, `status` whether to believe it."""

    def __init__(
        self,
        reaper: Reaper,
        commands: Commands,
        log_descriptor: int,
        on_finding: Callable[[Finding], None],
        times: SamplerTimes | None = None,
    ) -> None:
        self._reaper, self._commands, self._log_descriptor = reaper, commands, log_descriptor
        self._on_finding, self._times = on_finding, times or SamplerTimes()
        self.on_report: Callable[[SamplerReport], None] = lambda report: None
        self.status: Status = "starting"
        self.report: SamplerReport | None = None
        self.known = asyncio.Event()
        self._next_report = asyncio.Event()
        self._child: Child | None = None
        self._channel: Channel | None = None
        self._heard_s = 0.0
        self._abandoned: list[Child] = []
        self._told: set[Finding] = set()
        self._stopping = False

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child and self._child.is_alive else None

    async def wait_known(self, patience_s: float) -> None:
        """Wait, no longer than that, until the sampler has said its first word or failed to."""
        try:
            await within(patience_s, self.known.wait())
        except asyncio.TimeoutError:
            pass  # what is not known by then is said to be so

    async def wait_newer(self, than_mono_ns: int, patience_s: float) -> None:
        """Wait, no longer than that, for a look at the GPUs that began after ``than_mono_ns``."""

        async def look() -> None:
            while self.report is not None and self.report.t_mono_ns <= than_mono_ns:
                await self._next_report.wait()

        try:
            await within(patience_s, look())
        except asyncio.TimeoutError:
            pass  # the driver is slow; the last look counts

    async def supervise(self) -> None:
        """Run until there is nothing to sample or the agent ends."""
        backoff_s = self._times.backoff_s
        while not self._is_over():
            self._abandoned = [child for child in self._abandoned if child.is_alive]
            if len(self._abandoned) > 1:
                await asyncio.wait([child.exit for child in self._abandoned], return_when=asyncio.FIRST_COMPLETED)
                continue
            reported = await self._run_one()
            backoff_s = self._times.backoff_s if reported else min(backoff_s * 2, self._times.backoff_max_s)
            if not self._is_over():
                await asyncio.sleep(backoff_s)

    def stop(self) -> None:
        """End the sampler; it is not waited for."""
        self._stopping = True
        self._drop_channel()
        if self._child is not None:
            self._child.signal(signal.SIGKILL)

    def _is_over(self) -> bool:
        return self._stopping or self.status == "absent"

    async def _run_one(self) -> bool:
        """Start a sampler, watch it until it ends or hangs, and return whether it reported anything."""
        self._heard_s, first = time.monotonic(), True
        ours, theirs = socket.socketpair()
        try:
            child = self._reaper.spawn(
                self._commands.talking("sampler"), self._commands.environment({}), self._log_descriptor, theirs.fileno()
            )
        except (OSError, ValueError) as error:
            ours.close()
            self._set("failed", f"the sampler can't be started: {error}")
            return False
        finally:
            theirs.close()
        self._child, self.report = child, None
        self._channel = Channel(ours, self._heard, lambda reason: None)
        while not await child.wait(self._times.check_s):
            first = first and self.report is None
            limit_s = self._times.first_report_s if first else self._times.report_s
            if time.monotonic() - self._heard_s > limit_s and self.status != "absent":
                self._abandon(child, limit_s)
                return not first
        if self._channel is not None:
            self._channel.drain()
        self._drop_channel()
        reported = self.report is not None
        if not self._is_over():
            self.report = None
            self._set("failed", f"the sampler {child.describe_exit()}")
        return reported

    def _abandon(self, child: Child, silent_s: float) -> None:
        child.signal(signal.SIGKILL)
        self._abandoned.append(child)
        self._child = None
        self._drop_channel()
        self.report = None
        self._set("hung", f"the sampler said nothing for {silent_s:g} s: the driver may hang")

    def _heard(self, message: InternalMessage) -> None:
        if not isinstance(message, SamplerReport):
            return
        self._heard_s = time.monotonic()
        self.report = message
        self.status = "absent" if message.status == "absent" else "nvml"
        self.known.set()
        self._next_report.set()
        self._next_report = asyncio.Event()
        self.on_report(message)
        for finding in message.findings:
            if finding not in self._told and len(self._told) < 1000:
                self._told.add(finding)
                self._on_finding(finding)

    def _set(self, status: Status, text: str) -> None:
        log.warning("%s", text)
        finding = Finding(f"sampler_{status}", "warning", text)
        if self.status != status:
            self._on_finding(finding)
        self.status = status
        self.known.set()

    def _drop_channel(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None


def probe_figures(sampler: Sampler) -> Figures:
    """Return what stage ``probe`` tells: the host's memory now, and the GPUs as the sampler sees them."""
    total_bytes, available_bytes = hostfacts.memory_bytes()
    extra: dict[str, Figure] = {
        "sampler": sampler.status,
        "memory_total_bytes": total_bytes,
        "memory_available_bytes": available_bytes,
    }
    if sampler.report is not None:
        extra["gpus"] = len(sampler.report.gpus)
        extra["driver_version"] = sampler.report.driver_version
    return Figures(reason=_REASONS.get(sampler.status), extra=extra)
