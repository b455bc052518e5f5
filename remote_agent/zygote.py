"""The zygote: torch and transformers imported once, workers forked from it in milliseconds.

It imports and does nothing else. A fork is made only while the process has the threads that imports alone left and
no file of the driver's open, neither by CUDA nor by NVML; otherwise it is refused, with the numbers or the file.
Workers are forked twice, so that agentd, the child subreaper, becomes their parent.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import socket
import sys
import time
from pathlib import Path

from remote_agent import caches, worker
from remote_agent.forking import fork
from remote_agent.pipeline.gpu_count import gpus_counted_in_child
from remote_agent.pipeline.imports import (
    QUIET_IMPORTS,
    THREAD_VARIABLES,
    import_everything,
    import_what_exists,
    installed_versions,
    is_preimport_allowed,
    settle_environment,
)
from remote_agent.protocol.framing import FrameReader
from remote_agent.protocol.internal import (
    InternalMessage,
    ZygoteFork,
    ZygoteForked,
    ZygoteReady,
    ZygoteRefused,
    dump,
    parse,
)

CHUNK_BYTES = 1 << 16
MAX_DESCRIPTORS = 8
DRIVER_FILE_PREFIX = "/dev/nvidia"
"""Of what the CUDA driver opens, and NVML too."""


def main(argv: list[str]) -> int:
    """Import, say so on the inherited socket ``--fd``, then fork on demand until the socket closes."""
    parser = argparse.ArgumentParser(prog="python -m remote_agent zygote")
    parser.add_argument("--fd", type=int, required=True, help="descriptor of the socket to agentd")
    sock = socket.socket(fileno=parser.parse_args(argv).fd)
    sock.set_inheritable(False)
    given = {name: os.environ.get(name) for name in THREAD_VARIABLES}
    settle_environment(os.environ, {**QUIET_IMPORTS, **caches.NOWHERE})
    start_ns = time.monotonic_ns()
    with gpus_counted_in_child():
        import_everything()
    zygote = Zygote(sock, given)
    zygote.announce(time.monotonic_ns() - start_ns)
    return zygote.serve()


class Zygote:
    """Answers `ZygoteFork` messages, each with its two descriptors, one at a time.

    ``given``: the thread variables as they were before the imports; a worker gets them back.
    """

    def __init__(self, sock: socket.socket, given: dict[str, str | None]) -> None:
        self._sock = sock
        self._given = given
        self._threads = count_threads()
        self._fds: list[int] = []

    def announce(self, import_ns: int) -> None:
        """Say that forks can be asked for."""
        freeze_objects()
        paths = package_folders()
        self._send(ZygoteReady(os.getpid(), sys.executable, installed_versions(), import_ns, self._threads, paths))

    def serve(self) -> int:
        """Answer until the socket closes; returns 0."""
        reader = FrameReader()
        while True:
            data, fds, _, _ = socket.recv_fds(self._sock, CHUNK_BYTES, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
            self._fds += fds
            if not data:
                return 0
            for line in reader.feed(data):
                message = parse(line)
                if isinstance(message, ZygoteFork):
                    self._send(self._answer(message))

    def _answer(self, message: ZygoteFork) -> InternalMessage:
        fds, self._fds = self._fds[:2], self._fds[2:]
        try:
            if len(fds) < 2:
                return ZygoteRefused(f"a fork needs 2 descriptors and came with {len(fds)}")
            wanted = [name for name in message.preimport if is_preimport_allowed(name) and name not in sys.modules]
            if wanted:
                with gpus_counted_in_child():
                    import_what_exists(wanted)
                freeze_objects()
            hazard = find_fork_hazard(self._threads)
            if hazard is not None:
                return ZygoteRefused(hazard)
            return ZygoteForked(self._fork_twice(fds[0], fds[1], message))
        except OSError as error:
            return ZygoteRefused(f"fork failed: {error.strerror}")
        finally:
            for fd in fds:
                os.close(fd)

    def _fork_twice(self, socket_fd: int, stderr_fd: int, message: ZygoteFork) -> int:
        """Return the pid of a worker that is not this process's child."""
        reading, writing = os.pipe()
        middle = fork()
        if middle == 0:
            try:
                os.close(reading)
                self._fork_worker(writing, socket_fd, stderr_fd, message)
            finally:
                os._exit(1)
        os.close(writing)
        with open(reading, "rb") as pipe:
            answer = pipe.read()
        os.waitpid(middle, 0)
        if not answer:
            raise OSError(0, "the process between zygote and worker died")
        pid = int(answer)
        if pid < 0:
            raise OSError(-pid, os.strerror(-pid))
        return pid

    def _fork_worker(self, writing: int, socket_fd: int, stderr_fd: int, message: ZygoteFork) -> None:
        """Run in the process between: fork the worker, tell its pid (or minus the errno), end."""
        try:
            pid = fork()
            if pid == 0:
                os.close(writing)
                self._become_worker(socket_fd, stderr_fd, message)
        except OSError as error:
            pid = -(error.errno or 1)
        os.write(writing, str(pid).encode())
        os._exit(0)

    def _become_worker(self, socket_fd: int, stderr_fd: int, message: ZygoteFork) -> None:
        """Serve jobs in the forked process and never return."""
        code = 1
        try:
            self._sock.close()
            for fd in self._fds:
                os.close(fd)
            for name, value in self._given.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
            code = worker.serve_forked(socket_fd, stderr_fd, message.environment)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            worker.end_process(code)

    def _send(self, message: InternalMessage) -> None:
        self._sock.sendall(dump(message))


def package_folders() -> tuple[str, ...]:
    """Return the folders that imports came from.

    The working directory, which ``python -m`` puts before them, is the agent's own: what appears there is no package.
    """
    folders = (Path(path) for path in sys.path if path)
    return tuple(dict.fromkeys(str(folder) for folder in folders if folder.is_dir() and not folder.samefile(os.curdir)))


def freeze_objects() -> None:
    """Put what is alive out of the collector's sight, so that workers keep sharing its pages with the zygote."""
    gc.collect()
    gc.freeze()


def count_threads() -> int:
    """Return the threads of this process, those of C libraries included."""
    return sum(1 for _ in Path("/proc/self/task").iterdir())


def find_fork_hazard(threads: int) -> str | None:
    """Say in one line why forking now could hang or break the child; None if nothing speaks against it."""
    now = count_threads()
    if now != threads:
        return f"the zygote has {now} threads and imports alone left {threads}"
    return find_open_driver()


def find_open_driver(descriptors: Path = Path("/proc/self/fd")) -> str | None:
    """Say so if the CUDA driver or NVML is initialised in this process: either has files of the driver's open then.

    The driver isn't asked: of a call that fails before the fork it may keep what a worker's threads can't use.
    """
    for entry in descriptors.iterdir():
        with contextlib.suppress(OSError):  # the one that lists them is closed by now
            opened = str(entry.readlink())
            if opened.startswith(DRIVER_FILE_PREFIX):
                return f"the CUDA driver or NVML is initialised in the zygote: {opened} is open"
    return None
