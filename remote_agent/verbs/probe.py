"""``probe``: what this host is. GPUs are asked by a sampler in a process of its own, so a hung driver hangs nothing."""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import socket
import sys
import time

from remote_agent.agentd import hostfacts
from remote_agent.devices.findings import visible_finding
from remote_agent.loader.problems import shown
from remote_agent.protocol.codec import encode
from remote_agent.protocol.framing import FrameReader, ProtocolError
from remote_agent.protocol.internal import SamplerReport, parse
from remote_agent.protocol.messages import Finding, Gpu, Probe

PATIENCE_S = 10.0
"""Initialising a driver that persistence mode does not keep loaded takes seconds."""


def main(argv: list[str]) -> int:
    """Print what this host is; return 0, also where it has no GPU."""
    parser = argparse.ArgumentParser(
        prog="python -m remote_agent probe", description="Describe this host and its GPUs."
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    try:
        arguments = parser.parse_args(argv)
    except SystemExit as exit_request:
        return int(exit_request.code or 0)
    probe = probe_host()
    if arguments.json:
        print(json.dumps(encode(probe)))
    else:
        _print(probe)
    sys.stdout.flush()
    return 0


def probe_host(patience_s: float = PATIENCE_S) -> Probe:
    """Return what this host is; creates no CUDA context and waits at most ``patience_s`` for the driver."""
    begun = time.monotonic_ns()
    report = _ask_sampler(patience_s)
    total, available = hostfacts.memory_bytes()
    findings = report.findings if report is not None else (_hung(patience_s),)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and report is not None and report.gpus:
        findings = (*findings, visible_finding(visible, report.gpus))
    status = "hung" if report is None else report.status
    return Probe(
        hostname=hostfacts.hostname(),
        kernel=os.uname().release,
        cpu_count=len(os.sched_getaffinity(0)),
        memory_total_bytes=total,
        memory_available_bytes=available,
        sampler="nvml"
        if status == "nvml"
        else "absent"
        if status == "absent"
        else "hung"
        if report is None
        else "failed",
        driver_version=report.driver_version if report is not None else None,
        cuda_version=report.cuda_version if report is not None else None,
        gpus=report.gpus if report is not None else (),
        findings=findings,
        duration_ns=time.monotonic_ns() - begun,
    )


def _hung(patience_s: float) -> Finding:
    return Finding("nvml_hung", "error", f"the driver did not answer within {patience_s:g} s: it may hang")


def _ask_sampler(patience_s: float) -> SamplerReport | None:
    """Fork a sampler and return its first report; None if it says nothing in time.

    Such a one is killed and not waited for: the driver may hold it for ever.
    """
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        _sample_and_end(theirs)
    theirs.close()
    try:
        report = _first_report(ours, time.monotonic() + patience_s)
    finally:
        ours.close()
    if report is None:
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, os.WNOHANG if report is None else 0)
    return report


def _sample_and_end(sock: socket.socket) -> None:
    """Be the sampler, with no hold on the caller's terminal or pipes."""
    code = 1
    try:
        os.setsid()
        nowhere = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):
            os.dup2(nowhere, standard)
        from remote_agent.sampler import Sampler, import_nvml, serve

        code = serve(sock, Sampler(import_nvml()))
    finally:
        os._exit(code)


def _first_report(sock: socket.socket, deadline_s: float) -> SamplerReport | None:
    reader = FrameReader()
    while (left := deadline_s - time.monotonic()) > 0 and select.select([sock], [], [], left)[0]:
        try:
            data = sock.recv(1 << 16)
            messages = [parse(line) for line in reader.feed(data)]
        except (OSError, ProtocolError):
            break
        for message in messages:
            if isinstance(message, SamplerReport):
                return message
        if not data:
            finding = Finding("sampler_died", "error", "the process that asks NVML ended without an answer")
            return SamplerReport("failed", time.monotonic_ns(), findings=(finding,))
    return None


def _print(probe: Probe) -> None:
    gib = 1 << 30
    print(f"{shown(probe.hostname)}: Linux {probe.kernel}, {probe.cpu_count} processors")
    print(f"memory: {probe.memory_available_bytes / gib:.1f} of {probe.memory_total_bytes / gib:.1f} GiB available")
    if probe.sampler == "absent":
        print("no NVIDIA driver: this host runs CPU recipes")
    elif probe.sampler == "nvml":
        print(f"driver {probe.driver_version or 'unknown'}, CUDA {probe.cuda_version or 'unknown'}")
    for gpu in probe.gpus:
        print(f"GPU {gpu.index}: {shown(gpu.name)} {gpu.uuid}, {_memory(gpu)}")
    for finding in probe.findings:
        print(f"{finding.severity}: {shown(finding.text, 600)} [{finding.code}]")


def _memory(gpu: Gpu) -> str:
    if gpu.unified:
        return "memory: unified with the host's"
    if gpu.memory_total_bytes is None or gpu.memory_used_bytes is None:
        return "memory: not told by the driver"
    gib = 1 << 30
    return f"memory: {gpu.memory_used_bytes / gib:.1f} of {gpu.memory_total_bytes / gib:.1f} GiB used"
