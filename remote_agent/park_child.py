"""The process that has the driver checkpoint another one: one job in, one report out.

It runs on the run's own Python, which has the bindings; agentd never loads CUDA. It opens no context.
"""

from __future__ import annotations

import argparse
import socket

from remote_agent.devices.calls import Calls
from remote_agent.devices.cuda import DRIVER
from remote_agent.devices.process_checkpoint import Left, ProcessCheckpoint
from remote_agent.errors import DeviceError
from remote_agent.protocol.framing import FrameReader
from remote_agent.protocol.internal import InternalMessage, ParkGo, ParkJob, ParkReady, ParkReport, dump, parse
from remote_agent.protocol.messages import Failure


def main(argv: list[str]) -> int:
    """Do the ParkJob that comes over the inherited socket ``--fd``, answer one ParkReport, end."""
    parser = argparse.ArgumentParser(prog="python -m remote_agent park-child")
    parser.add_argument("--fd", type=int, required=True, help="descriptor of the socket to agentd")
    with socket.socket(fileno=parser.parse_args(argv).fd) as sock:
        sock.setblocking(True)
        serve(sock, Calls(DRIVER))
    return 0


def serve(sock: socket.socket, driver: Calls) -> None:
    """Do one job; nothing where the other side closes before it says to go on."""
    reader = FrameReader()
    job = _receive(sock, reader)
    if not isinstance(job, ParkJob):
        return
    process = ProcessCheckpoint(driver, job.pid)
    is_park = job.action == "park"
    try:
        process.require_support()
    except DeviceError as error:
        untouched: Left = "running" if is_park else "parked"
        _send(sock, ParkReport(untouched, process.steps, Failure("unsupported", str(error))))
        return
    if is_park:
        _send(sock, ParkReady())
        if not isinstance(_receive(sock, reader), ParkGo):
            return
    _send(sock, do_job(process, job))


def do_job(process: ProcessCheckpoint, job: ParkJob) -> ParkReport:
    """Park or unpark, and say how the process was left."""
    failure = None
    try:
        if job.action == "park":
            process.park(job.lock_timeout_ms)
        else:
            process.unpark()
    except DeviceError as error:
        failure = Failure(f"{job.action}_failed", str(error))
    return ParkReport(process.left(), process.steps, failure)


def _receive(sock: socket.socket, reader: FrameReader) -> InternalMessage | None:
    while data := sock.recv(1 << 16):
        for line in reader.feed(data):
            return parse(line)
    return None


def _send(sock: socket.socket, message: InternalMessage) -> None:
    try:
        sock.sendall(dump(message))
    except OSError:
        pass  # nobody is left to be told; the job is done all the same
