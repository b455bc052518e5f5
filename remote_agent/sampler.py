"""Holds NVML and reports every GPU twice a second, in a process of its own: a driver that hangs takes only this.

Reports ``absent`` once and ends where there is no NVIDIA driver; ``failed`` with a finding
where there is one that does not answer, and tries again. Ends when its socket closes.
"""

from __future__ import annotations

import argparse
import importlib
import select
import socket
import time
from typing import Any

from remote_agent.devices.findings import HostPaths, explain_failed_start, host_findings, lost_access
from remote_agent.devices.gpu_events import GpuEvents
from remote_agent.devices.nvml import (
    DRIVER_NOT_LOADED,
    LIBRARY_NOT_FOUND,
    UNKNOWN_ERROR,
    Nvml,
    read_gpus,
    read_versions,
)
from remote_agent.protocol.internal import SamplerReport, dump
from remote_agent.protocol.messages import Finding

INTERVAL_S = 0.5
RETRY_S = 5.0
"""How long a driver that does not start is left alone."""


class Sampler:
    """Takes one look at a time. ``module`` is pynvml, or None where it is not installed."""

    def __init__(self, module: Any, paths: HostPaths | None = None) -> None:
        self._module = module
        self._paths = paths or HostPaths()
        self._events = GpuEvents(Nvml(module))
        self._is_started = False

    def look(self) -> SamplerReport:
        """Return one report; starts NVML first where it has not started yet."""
        if not self._is_started:
            refusal = self._start()
            if refusal is not None:
                return refusal
        began_mono_ns = time.monotonic_ns()
        nvml = Nvml(self._module)
        driver, cuda = read_versions(nvml)
        gpus, findings = read_gpus(nvml)
        if not gpus and findings and all(f"NVML error {UNKNOWN_ERROR}" in finding.text for finding in findings):
            findings = (*findings, lost_access(self._paths))
            self._stop()
        findings = (*findings, *host_findings(gpus, self._paths))
        return SamplerReport("nvml", began_mono_ns, driver, cuda, gpus, findings, self._events.read())

    def _start(self) -> SamplerReport | None:
        if self._module is None:
            if not self._paths.has_driver():
                return _report("absent")
            return _report("failed", Finding("nvml_missing", "error", "pynvml is not installed with the agent"))
        started = Nvml(self._module).ask("nvmlInit")
        if started.code == 0:
            self._is_started = True
            self._events.start()
            return None
        if started.code in (LIBRARY_NOT_FOUND, DRIVER_NOT_LOADED):
            if not self._paths.has_driver():
                return _report("absent")
            text = (
                f"a driver is loaded and NVML can't be used (error {started.code}): libnvidia-ml.so.1 is missing here"
            )
            return _report("failed", Finding("nvml_library_missing", "error", text))
        code = started.code if started.code is not None else UNKNOWN_ERROR
        return _report("failed", explain_failed_start(code, self._paths))

    def _stop(self) -> None:
        self._events.stop()
        Nvml(self._module).ask("nvmlShutdown")
        self._is_started = False


def main(argv: list[str]) -> int:
    """Report over the inherited socket ``--fd`` until it closes."""
    parser = argparse.ArgumentParser(prog="python -m remote_agent sampler")
    parser.add_argument("--fd", type=int, required=True, help="descriptor of the socket to agentd")
    with socket.socket(fileno=parser.parse_args(argv).fd) as sock:
        return serve(sock, Sampler(import_nvml()))


def serve(sock: socket.socket, sampler: Sampler, interval_s: float = INTERVAL_S, retry_s: float = RETRY_S) -> int:
    """Send one report after another; return 0 once the socket is closed or there is no driver to watch."""
    sock.setblocking(True)
    while True:
        report = sampler.look()
        try:
            sock.sendall(dump(report))
        except OSError:
            return 0
        if report.status == "absent":
            return 0
        if _is_closed_within(sock, interval_s if report.status == "nvml" else retry_s):
            return 0


def import_nvml() -> Any:
    """Return pynvml, or None where it is not installed."""
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return None


def _is_closed_within(sock: socket.socket, timeout_s: float) -> bool:
    """Wait, and tell whether the other side closed; whatever it says meanwhile is dropped."""
    deadline = time.monotonic() + timeout_s
    while (left := deadline - time.monotonic()) > 0:
        if not select.select([sock], [], [], left)[0]:
            return False
        try:
            if not sock.recv(4096):
                return True
        except OSError:
            return True
    return False


def _report(status: str, *findings: Finding) -> SamplerReport:
    return SamplerReport(status, time.monotonic_ns(), findings=findings)
