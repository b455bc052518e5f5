"""The fleet without a screen: every node's live state, and every action on it. Used by the app and by the verbs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import db.errors
from console.clean import clean_record
from console.config import Config
from console.errors import HistoryError, NodeUnreachable, UsageError
from console.launches import Launches
from console.links import LinkFactory, real_links
from console.locations import locations
from console.recorder import Recorder
from console.session import Session
from console.state import BaselineKey, NodeState, RunView, StageBaseline, elapsed_ns
from console.transports.gate import Gate
from db.database import OpenedHistory, open_history
from db.queries import History
from db.writer import Writer
from remote_agent.protocol.codec import decode
from remote_agent.protocol.messages import (
    Actor,
    CacheClearParams,
    CacheClearResult,
    CacheListParams,
    CacheListResult,
    ParkParams,
    ParkResult,
    Probe,
    Recipe,
    ReleaseParams,
    ReleaseResult,
    Resident,
    RunFinished,
    RunRecord,
    RunResult,
    RunUidParams,
    StandbyStopParams,
    StandbyStopResult,
    StatusResult,
    Tier,
)
from remote_agent.recipe import recipe_hash

T = TypeVar("T")

CLOSE_S = 5.0
ANSWER_S = 12.0
PARK_S = 600.0
"""How long a driver may take to move a whole GPU's memory to or from the host's."""

log = logging.getLogger(__name__)


class Fleet:
    """Holds a link to each node, keeps their states and the history. Create and use it on one event loop.

    ``nodes``: names of the nodes to follow, all by default. ``parallel``: how many runs
    this console lets load at once. ``links`` makes the links; by default real ones with
    this environment's keys.
    """

    def __init__(
        self,
        config: Config,
        history_path: Path,
        *,
        nodes: Sequence[str] | None = None,
        parallel: int = 8,
        actor: Actor,
        links: LinkFactory | None = None,
    ) -> None:
        self.config = config
        self._history_path = history_path
        self._followed = tuple(config.node(name) for name in nodes) if nodes is not None else config.nodes
        self._launches = Launches(parallel, actor, config.storage_groups)
        self._links = links
        self._sessions: dict[str, Session] = {}
        self._dirty: set[str] = set()
        self._cursors: dict[str, int] = {}
        self._opened: OpenedHistory | None = None
        self._history: History | None = None
        self._writer: Writer | None = None
        self._recorder: Recorder | None = None
        self._problem: str | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._repairs: set[asyncio.Task[None]] = set()

    # --- life -----------------------------------------------------------------

    async def start(self) -> None:
        """Open the history and begin to reach every node. Raises: HistoryError."""
        self._loop = asyncio.get_running_loop()
        try:
            self._opened = await asyncio.to_thread(open_history, self._history_path)
            self._history = History(self._opened.path)
            self._writer = Writer(self._opened.path, on_problem=self._on_problem)
        except db.errors.HistoryError as error:
            raise HistoryError(str(error)) from error
        self._recorder = Recorder(self._writer, self._loop)
        self._writer.on_durable = self._on_durable
        factory = self._links or real_links(Gate.create(locations(os.environ), os.environ))
        hashes = {name: recipe_hash(recipe) for name, recipe in self.config.recipes.items()}
        for node in self._followed:
            wanted = tuple(hashes[name] for name in node.recipes if name in hashes) or tuple(hashes.values())
            session = Session(node, self._recorder, self._baseline, wanted, self._dirty.add)
            session.link = factory(node, self._opened.history_uuid, self._cursor, session)
            self._sessions[node.name] = session
            self._dirty.add(node.name)
        for session in self._sessions.values():
            session.spawn(self._recall(session))
            assert session.link is not None
            session.link.start()

    async def close(self) -> None:
        """End every link and store what has come, within a few seconds whatever the nodes do."""
        for task in self._repairs:
            task.cancel()
        closing = [asyncio.ensure_future(session.close()) for session in self._sessions.values()]
        if closing:
            _, late = await asyncio.wait(closing, timeout=CLOSE_S)
            for task in late:
                task.cancel()
        if self._history is not None:
            self._history.close()  # before the writer, whose close leaves the file in one piece
        if self._writer is not None and not await asyncio.to_thread(self._writer.close, CLOSE_S):
            log.warning("the history could not store everything; the hosts keep it and send it again")

    async def __aenter__(self) -> Fleet:
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # --- what is known ----------------------------------------------------------

    @property
    def nodes(self) -> tuple[str, ...]:
        """The followed nodes' names, in the configuration's order."""
        return tuple(node.name for node in self._followed)

    @property
    def history(self) -> History:
        assert self._history is not None, "start the fleet first"
        return self._history

    @property
    def notices(self) -> tuple[str, ...]:
        """What an operator must know about the console itself, one line each."""
        moved = self._opened.notice if self._opened is not None else None
        return tuple(text for text in (moved, self._problem) if text)

    @property
    def parallel(self) -> int:
        """How many runs this console lets load at once; may be set at any time."""
        return self._launches.places.limit

    @parallel.setter
    def parallel(self, parallel: int) -> None:
        self._launches.places.limit = parallel

    def state(self, name: str) -> NodeState:
        """Return what is known of the node now; before `start`, its name and settings."""
        session = self._sessions.get(name)
        if session is not None:
            return session.state
        node = self.config.node(name)
        return NodeState(node.name, tags=node.tags, recipes=node.recipes)

    def take_dirty(self) -> set[str]:
        """Return the names of nodes whose state has changed since the last call."""
        dirty = set(self._dirty)
        self._dirty.clear()
        return dirty

    def elapsed_ns(self, name: str) -> int | None:
        """Return how long the run that the node shows has taken, on the host's clock."""
        state = self.state(name)
        return elapsed_ns(state.run, state, time.monotonic_ns()) if state.run else None

    def describe_link(self, name: str) -> str:
        """Return one line on how the node's link stands and why."""
        return self._session(name).describe_link()

    async def flush(self, timeout_s: float = CLOSE_S) -> bool:
        """Wait until everything that has come is in the history; False if it is not in time."""
        assert self._writer is not None, "start the fleet first"
        return await asyncio.to_thread(self._writer.flush, timeout_s)

    # --- actions ----------------------------------------------------------------

    async def warm(
        self,
        node: str,
        recipe_name: str,
        *,
        run_uid: str | None = None,
        recipe: Recipe | None = None,
        arm: bool = False,
    ) -> str:
        """Start a run and return its uid; where every parallel place is taken it waits, and is seen waiting.

        With ``arm`` it makes all but the weights, and its process waits for them.

        Raises: UsageError for an unknown name; NodeUnreachable with the link's reason; RequestRefused by the node.
        """
        session = self._session(node)
        recipe = recipe or self.config.recipe(recipe_name)
        run_uid = run_uid or uuid.uuid4().hex
        await session.until_connected(session.node.connect_timeout_s)
        await self._launches.launch(session, run_uid, recipe, session.node.connect_timeout_s + ANSWER_S, arm)
        return run_uid

    async def wait(self, node: str, run_uid: str, timeout_s: float | None = None) -> RunView:
        """Return the run once it is over. A lost link is waited out: it says nothing about the run.

        Raises: NodeUnreachable once no retry will be made, or when the time is over while the
        node is out of reach; TimeoutError when it is over and the node still works on it.
        """
        session = self._session(node)
        try:
            return await session.until_over(run_uid, timeout_s)
        except TimeoutError:
            if not session.state.is_known:
                raise NodeUnreachable(session.describe_link()) from None
            raise

    async def accepted(self, node: str, run_uid: str) -> RunView:
        """Return the run once its node has accepted it, or it is over. Raises: as `wait`."""
        return await self._session(node).until_accepted(run_uid)

    async def cancel(self, node: str, run_uid: str) -> None:
        """End a run, or take it out of the queue. Raises: LinkError, RequestRefused."""
        if not self._launches.withdraw(self._session(node), run_uid):
            await self.cancel_run(node, run_uid)

    async def cancel_run(self, node: str, run_uid: str) -> RunRecord:
        """Have the node end a run; return what it is then. Raises: LinkError, RequestRefused."""
        answer = await self.ask(node, "run.cancel", RunUidParams(run_uid), RunResult)
        self._session(node).found(answer.run)
        return answer.run

    async def find_run(self, node: str, run_uid: str, timeout_s: float = ANSWER_S) -> RunRecord:
        """Return a run as its node has it now. Raises: LinkError, RequestRefused."""
        answer = await self.ask(node, "run.get", RunUidParams(run_uid), RunResult, timeout_s)
        self._session(node).found(answer.run)
        return answer.run

    async def ask(self, node: str, method: str, params: object, result: type[T], timeout_s: float = ANSWER_S) -> T:
        """Ask the node one thing, once it can be asked. Raises: LinkError, RequestRefused."""
        session = self._session(node)
        await session.until_connected(session.node.connect_timeout_s)
        return await session.request(method, params, result, timeout_s)

    async def release(self, node: str, run_uid: str | None = None) -> tuple[Resident, ...]:
        """Let go of what a run left warm, of everything by default. Raises: LinkError, RequestRefused."""
        return (await self.let_go(node, ReleaseParams(run_uid, everything=run_uid is None))).released

    async def let_go(self, node: str, params: ReleaseParams) -> ReleaseResult:
        """Let go of what is named; the answer may take ``wait_s`` longer. Raises: LinkError, RequestRefused."""
        answer = await self.ask(node, "resident.release", params, ReleaseResult, ANSWER_S + params.wait_s)
        await self._session(node).status()
        return answer

    async def stop_standbys(self, node: str, recipe_name: str) -> tuple[Resident, ...]:
        """End the standbys of a recipe, armed or with weights; what is resident of it stays.

        Raises: LinkError, RequestRefused.
        """
        answer = await self.ask(node, "standby.stop", StandbyStopParams(recipe_name), StandbyStopResult)
        await self._session(node).status()
        return answer.stopped

    async def park(self, node: str, run_uid: str) -> ParkResult:
        """Take a run's standbys off their devices. Raises: LinkError, RequestRefused."""
        return await self._move(node, "park", run_uid)

    async def unpark(self, node: str, run_uid: str) -> ParkResult:
        """Put a run's parked standbys back. Raises: LinkError, RequestRefused."""
        return await self._move(node, "unpark", run_uid)

    async def _move(self, node: str, method: str, run_uid: str) -> ParkResult:
        answer = await self.ask(node, method, ParkParams(run_uid), ParkResult, PARK_S)
        await self._session(node).status()
        return answer

    def said(self, node: str) -> tuple[str, ...]:
        """Return what the console itself has had to say about the node since `start`, a line each."""
        return tuple(self._session(node).said)

    async def probe(self, node: str) -> Probe:
        """Ask the node what it is. Raises: LinkError, RequestRefused."""
        session = self._session(node)
        await session.until_connected(session.node.connect_timeout_s)
        return await session.probe()

    async def status(self, node: str) -> StatusResult:
        """Ask the node what is on it. Raises: LinkError, RequestRefused."""
        session = self._session(node)
        await session.until_connected(session.node.connect_timeout_s)
        return await session.status()

    async def list_cache(self, node: str, directory: str | None = None) -> CacheListResult:
        """Ask the node what a compile cache keeps. Raises: LinkError, RequestRefused."""
        return await self.ask(node, "cache.list", CacheListParams(directory), CacheListResult)

    async def clear_cache(self, node: str, params: CacheClearParams) -> CacheClearResult:
        """Have the node clear what is named. Raises: LinkError; RequestRefused under a run, or without such a key."""
        return await self.ask(node, "cache.clear", params, CacheClearResult)

    def retry_now(self, node: str) -> None:
        """Try to reach the node at once, whatever its link waits for."""
        link = self._session(node).link
        assert link is not None
        link.retry_now()

    # --- within -----------------------------------------------------------------

    def _session(self, name: str) -> Session:
        if name not in self._sessions:
            raise UsageError(f"no node {name!r} is followed here")
        return self._sessions[name]

    def _cursor(self, journal_uuid: str) -> int:
        stored = self.history.cursor(journal_uuid)
        return max(stored, self._cursors.get(journal_uuid, 0))

    async def _recall(self, session: Session) -> None:
        """Tell a session the last run of its node that the history has the end of: the node need not tell it again."""
        try:
            event = await asyncio.to_thread(self.history.last_end, session.node.name)
            run = clean_record(decode(RunFinished, json.loads(event.data_json)).run) if event is not None else None
        except (db.errors.HistoryError, ValueError) as error:
            log.warning("%s: its last run is not known from the history: %s", session.node.name, error)
            return
        if run is not None:
            key = (run.recipe_hash, run.tier_from, run.tier_to is Tier.ARMED)
            session.recall(run, await self._baseline(session.node.name, key, before=run.run_uid))

    async def _baseline(self, node: str, key: BaselineKey, before: str | None = None) -> StageBaseline | None:
        recipe_hash, tier, armed = key
        try:
            found = await asyncio.to_thread(
                self.history.baseline, node, recipe_hash, tier.value, before=before, armed=armed
            )
        except db.errors.HistoryError as error:
            log.warning("no baseline: %s", error)
            return None
        if found is None:
            return None
        return StageBaseline(found.count, found.wall_ns, found.stages_ns, found.recent_wall_ns)

    def _on_durable(self, journal_uuid: str, seq: int) -> None:
        """From the writer's thread."""
        assert self._recorder is not None
        self._cursors[journal_uuid] = seq
        self._recorder.durable(journal_uuid, seq)

    def _on_problem(self, text: str | None) -> None:
        """From the writer's thread."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._note_problem, text)

    def _note_problem(self, text: str | None) -> None:
        self._problem = text
        self._dirty.update(self._sessions)
        if text is not None or self._recorder is None:
            return
        for session in self._sessions.values():
            if session.state.journal_uuid in self._recorder.refused:
                task = asyncio.ensure_future(self._replay(session))
                self._repairs.add(task)
                task.add_done_callback(self._repairs.discard)

    async def _replay(self, session: Session) -> None:
        """Have a node send again what the history could not take, by a new conversation from its cursor."""
        assert self._recorder is not None
        assert session.link is not None
        await session.link.stop()
        if session.state.journal_uuid is not None:
            self._recorder.resume(session.state.journal_uuid)
        session.link.start()
