"""``agentd``: the agent's process. Listens on a socket that only this user can reach, and serves whoever connects."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from remote_agent.agentd import hostfacts
from remote_agent.agentd.commands import Commands
from remote_agent.agentd.daemon import detach, open_log, redirect, take_lock, write_pid
from remote_agent.agentd.launch import ALREADY_RUNS
from remote_agent.agentd.methods import methods
from remote_agent.agentd.options import Options
from remote_agent.agentd.paths import StateDir, default_root
from remote_agent.agentd.processes import MARK
from remote_agent.agentd.reaper import Reaper
from remote_agent.agentd.session import Session
from remote_agent.agentd.supervisor import Supervisor
from remote_agent.agentd.tenure import Tenure
from remote_agent.errors import StateDirError
from remote_agent.keeper.sockets import peer_uid
from remote_agent.protocol.budget import Budget, parse_budget
from remote_agent.protocol.messages import GpuSample, HostSample, Progress, Sample

log = logging.getLogger(__name__)

TOUCH_S = 60.0
FLUSH_S = 1.0
TURNED_AWAY = 16
"""How many clients over the limit may wait at once to be told so."""


class Server:
    """Accepts clients and keeps them informed; what they ask for is the supervisor's."""

    def __init__(self, supervisor: Supervisor, tenure: Tenure, listener: socket.socket) -> None:
        self._supervisor, self._tenure, self._listener = supervisor, tenure, listener
        self._complaint = ""
        self._sessions: dict[Session, None] = {}
        self._turned_away: dict[Session, None] = {}
        self._refused = 0
        self._all_gone = asyncio.Event()
        self._progress: dict[tuple[str, str], Progress] = {}
        self._connecting: set[asyncio.Future[None]] = set()
        self._handlers = methods(supervisor)
        supervisor.events.on_durable = self._wake
        supervisor.on_progress = self._keep_progress
        listener.setblocking(False)

    async def serve(self) -> None:
        """Serve until the supervisor stops."""
        loop, options = asyncio.get_running_loop(), self._supervisor.options
        loop.add_reader(self._listener, self._accept)
        tickers = [
            asyncio.ensure_future(_every(options.heartbeat_s, self._heartbeat)),
            asyncio.ensure_future(_every(options.host_sample_s, self._sample_host)),
            asyncio.ensure_future(_every(TOUCH_S, self._touch)),
            asyncio.ensure_future(_every(options.watch_s, self._watch)),
        ]
        try:
            await self._supervisor.stopping.wait()
        finally:
            loop.remove_reader(self._listener)
            self._listener.close()
            for ticker in tickers:
                ticker.cancel()

    async def finish(self) -> None:
        """Let clients have what is written for them, for a moment, and close."""
        self._wake()
        await asyncio.sleep(0)
        for session in [*self._sessions, *self._turned_away]:
            session.close()
        if self._sessions:
            self._all_gone.clear()
            await asyncio.wait([asyncio.ensure_future(self._all_gone.wait())], timeout=FLUSH_S)

    def ended(self, session: Session) -> None:
        self._sessions.pop(session, None)
        self._turned_away.pop(session, None)
        if not self._sessions:
            self._all_gone.set()

    def _accept(self) -> None:
        try:
            link, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            log.error("clients can't be accepted: %s", error)
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._listener)
            loop.call_later(1.0, self._accept_again)
            return
        uid = peer_uid(link)
        if uid not in (0, os.geteuid()):
            if not self._refused:
                log.warning("a client of user id %s is refused", uid)
            self._refused += 1
            link.close()
            return
        link.setblocking(False)
        self._connect(self._admit(), link)

    def _admit(self) -> Session:
        """Return a session for one more client; where no room is left and none can be made, one that says so."""
        limit = self._supervisor.options.clients.clients
        if len(self._sessions) < limit or self._make_room(self._sessions):
            session = Session(self._supervisor, self._handlers, self)
            self._sessions[session] = None
            return session
        self._refused += 1
        if len(self._turned_away) >= TURNED_AWAY:
            self._make_room(self._turned_away)
        text = f"{limit} clients are connected to this agent already: close one"
        session = Session(self._supervisor, self._handlers, self, text)
        self._turned_away[session] = None
        return session

    def _make_room(self, sessions: dict[Session, None]) -> bool:
        """Drop the oldest client that has not said hello, and return whether there was one."""
        silent = next((session for session in sessions if not session.greeted), None)
        if silent is None:
            return False
        self._refused += 1
        silent.drop_silent()
        sessions.pop(silent)
        return True

    def _connect(self, session: Session, link: socket.socket) -> None:
        connecting = asyncio.ensure_future(_connect(session, link))
        self._connecting.add(connecting)
        connecting.add_done_callback(self._connecting.discard)

    def _accept_again(self) -> None:
        if self._listener.fileno() >= 0:
            asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _watch(self) -> None:
        """See that the state directory is still this agent's and that clients find the socket."""
        try:
            reason = self._tenure.lost()
            if reason is not None:
                self._supervisor.abandon(reason)
            if not self._tenure.has_socket():
                self._rebind()
            self._complaint = ""
        except (OSError, StateDirError) as error:
            if self._complaint != str(error):
                log.error("the state directory can't be looked after: %s", error)
            self._complaint = str(error)

    def _rebind(self) -> None:
        listener = self._tenure.rebind()
        listener.setblocking(False)
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listener)
        self._listener.close()
        self._listener = listener
        loop.add_reader(listener, self._accept)
        log.warning("the agent's socket was removed: it listens again")
        self._supervisor.find_keeper()

    def _wake(self) -> None:
        for session in list(self._sessions):
            session.wake()

    def _heartbeat(self) -> None:
        for session in list(self._sessions):
            session.heartbeat()

    def _touch(self) -> None:
        for session in self._sessions:
            session.touch()
        self._supervisor.events.cursors_changed()
        if self._refused:
            log.warning("%s clients were refused or dropped before they said hello", self._refused)
            self._refused = 0

    def _keep_progress(self, progress: Progress) -> None:
        if not self._progress:
            asyncio.get_running_loop().call_later(self._supervisor.options.progress_s, self._flush_progress)
        self._progress[progress.run_uid, progress.stage] = progress

    def _flush_progress(self) -> None:
        while self._progress:
            _, progress = self._progress.popitem()
            self._send(Sample(time.monotonic_ns(), time.time_ns(), progress=progress))

    def _sample_host(self) -> None:
        if not self._sessions:
            return
        report = self._supervisor.sampler.report
        gpus = tuple(
            GpuSample(g.uuid, g.memory_used_bytes, g.memory_total_bytes, g.utilisation, g.temperature_c, g.power_w)
            for g in (report.gpus if report else ())
        )
        host = HostSample(*hostfacts.memory_bytes(), hostfacts.load_1m(), gpus)
        self._send(Sample(time.monotonic_ns(), time.time_ns(), host=host))

    def _send(self, sample: Sample) -> None:
        for session in list(self._sessions):
            session.sample(sample)


async def _connect(session: Session, link: socket.socket) -> None:
    await asyncio.get_running_loop().connect_accepted_socket(lambda: session, link)


async def _every(interval_s: float, act: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(interval_s)
        act()


async def run_agent(
    state: StateDir,
    lock: int,
    log_descriptor: int,
    options: Options | None = None,
    commands: Commands | None = None,
    reaper: Reaper | None = None,
    on_ready: Callable[[], None] = lambda: None,
) -> None:
    """Be the agent of ``state`` until told to stop. ``lock`` is what `take_lock` returned."""
    tenure = Tenure(state, lock)
    supervisor = Supervisor(state, tenure.directory, log_descriptor, options, commands, reaper)
    loop = asyncio.get_running_loop()
    ending: list[asyncio.Future[None]] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: ending.append(asyncio.ensure_future(_stop(supervisor))))
    listener = tenure.bind()  # only now: whoever finds the socket may also end the agent
    supervisor.start()
    server = Server(supervisor, tenure, listener)
    on_ready()
    try:
        await server.serve()
        tenure.unbind()
        await server.finish()
    finally:
        supervisor.close()
        tenure.close()


async def _stop(supervisor: Supervisor) -> None:
    await supervisor.end_everything("the agent was ended by a signal")
    supervisor.stopping.set()


def main(argv: list[str]) -> int:
    """Start the agent and return once it listens (or with ``--foreground``, once it ends); 3 if one runs already."""
    parser = argparse.ArgumentParser(prog="python -m remote_agent agentd", description="The agent's daemon.")
    parser.add_argument("--state-dir", type=Path, help="where it keeps its socket, journal and runs")
    parser.add_argument("--foreground", action="store_true", help="stay attached; the log goes to stderr")
    parser.add_argument("--devices-folder", type=Path, default=Path("/dev"), help="where the keeper looks for GPUs")
    parser.add_argument(
        "--hold-budget",
        type=_budget,
        action="append",
        default=[],
        metavar="SIZE",
        help="what warm models may take of each device, as 80%% or 60GB; more is refused or makes room",
    )
    arguments = parser.parse_args(argv)
    if not arguments.foreground:
        os.closerange(3, 1 << 20)  # nothing of the caller's stays open in a daemon
    try:
        state = StateDir(arguments.state_dir or default_root(os.environ))
        state.prepare()
    except StateDirError as error:
        print(f"agentd: {error}", file=sys.stderr)
        return 1
    options = Options(devices_folder=arguments.devices_folder, hold_budgets=tuple(arguments.hold_budget))
    return launch(state, options, foreground=arguments.foreground)


def _budget(text: str) -> Budget:
    try:
        return parse_budget(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def launch(
    state: StateDir,
    options: Options,
    commands: Commands | None = None,
    reaper: Reaper | None = None,
    foreground: bool = False,
) -> int:
    """Take the lock, detach unless ``foreground``, and be the agent. Returns the exit code."""
    lock = take_lock(state)
    if lock is None:
        print(f"agentd: another agent holds {state.lock}", file=sys.stderr)
        return ALREADY_RUNS
    ready = None if foreground else detach()
    write_pid(lock)
    os.umask(0o077)
    os.chdir(state.root)
    os.environ[MARK] = str(state.root)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    log_descriptor = open_log(state)
    if ready is not None:
        redirect(log_descriptor)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s")

    def say_ready() -> None:
        log.info("the agent of %s listens", state.root)
        if ready is not None:
            os.write(ready, b"1")
            os.close(ready)

    try:
        asyncio.run(run_agent(state, lock, log_descriptor, options, commands, reaper, say_ready))
    except Exception:
        log.exception("the agent ends")
        return 1
    finally:
        os.close(lock)
    log.info("the agent has ended")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
