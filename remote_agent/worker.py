"""A worker: one run after another on one device, and the warm model kept in between.

It starts as a child of agentd (``main``) or as a fork of the zygote (``serve_forked``).
Its stdout and stderr both go to the log that agentd gave it, with each job to that run's,
so nothing that a model prints can reach the socket; its own process group dies with that socket.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from remote_agent import caches
from remote_agent.cache_store import in_use
from remote_agent.pipeline.channel import Channel, flush_output
from remote_agent.pipeline.imports import WORKER_ENVIRONMENT, settle_environment
from remote_agent.protocol.internal import (
    WorkerAsk,
    WorkerAttach,
    WorkerFailed,
    WorkerJob,
    WorkerMap,
    WorkerPrepare,
    WorkerRelease,
    WorkerUnmap,
)
from remote_agent.protocol.messages import Failure


def main(argv: list[str]) -> int:
    """Serve the jobs that come over the inherited socket ``--fd``."""
    parser = argparse.ArgumentParser(prog="python -m remote_agent worker")
    parser.add_argument("--fd", type=int, required=True, help="descriptor of the socket to agentd")
    fd = parser.parse_args(argv).fd
    sock = socket.socket(fileno=claim_standard_streams(fd, 2))
    settle_environment(os.environ, {**WORKER_ENVIRONMENT, **caches.NOWHERE})
    end_process(serve(sock))


def serve_forked(socket_fd: int, stderr_fd: int, environment: Mapping[str, str]) -> int:
    """Serve jobs in a process just forked from the zygote; the caller ends it with the returned code."""
    sock = socket.socket(fileno=claim_standard_streams(socket_fd, stderr_fd))
    os.environ.update(environment)
    return serve(sock)


def serve(sock: socket.socket) -> int:
    """Do jobs until told to release, and return the exit code; a failed job is reported and is the last."""
    sock.set_inheritable(False)
    faulthandler.enable()  # a crash in a library leaves its Python stack as the last lines of the log
    channel = Channel(sock)
    channel.watch()
    # Imported here: the stages import torch, and in a fresh worker that is part of the first job's init.
    from remote_agent.pipeline.runner import Runner

    runner = Runner(channel)
    while True:
        message = channel.receive()
        if isinstance(message, WorkerRelease):
            return 0
        if isinstance(message, WorkerPrepare):
            runner.prepare(message)
            continue
        if isinstance(message, (WorkerUnmap, WorkerMap)):
            runner.move(message)  # where that fails agentd knows why, and ends this process
            continue
        if isinstance(message, WorkerAsk):
            runner.answer()
            continue
        if isinstance(message, WorkerAttach):
            if not runner.attach(message):  # no use of the compile cache: who serves would keep it from being cleared
                return 0
            continue
        if not isinstance(message, WorkerJob):
            failure = Failure("protocol", f"a worker waits for a job, not for a {type(message).__name__}")
            channel.send(WorkerFailed(failure))
            return 1
        with in_use(use_job_cache(message)):
            goes_on = runner.run(message)
        if not goes_on:
            return 0


def use_job_cache(job: WorkerJob) -> Path | None:
    """Point the compile stack at the job's cache where that can be used, and return it: models may compile themselves.

    Where it can't, and the recipe asks for a compile, that stage says why.
    """
    os.environ.update(caches.NOWHERE)
    try:
        directory = Path(job.cache_directory).expanduser()
    except RuntimeError:
        return None  # there is no home directory
    if caches.find_cache_problem(directory) is not None:
        return None
    caches.use_cache(directory, os.environ)
    return directory


def claim_standard_streams(socket_fd: int, stderr_fd: int) -> int:
    """Make this process a group of its own with the log as stdout and stderr; return where the socket is now."""
    if os.getpgrp() != os.getpid():
        os.setsid()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if socket_fd <= 2:
        socket_fd = os.dup(socket_fd)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    if stderr_fd != 2:
        os.dup2(stderr_fd, 2)
    os.dup2(2, 1)
    for fd in {nothing, stderr_fd} - {0, 1, 2, socket_fd}:
        os.close(fd)
    return socket_fd


def end_process(code: int) -> NoReturn:
    """Flush what was printed and end without interpreter clean-up, which CUDA and forked state can hang."""
    flush_output()
    os._exit(code)
