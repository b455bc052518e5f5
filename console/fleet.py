"""The fleet without a screen: every node's live state, and every action on it. Used by the app and by the verbs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import db.errors
from console.config import Config
from console.errors import HistoryError, NodeUnreachable, UsageError
from console.launches import Launches, Unless
from console.links import LinkFactory
from console.past import baseline, recall
from console.recorder import Recorder
from console.requests import ANSWER_S, Requests
from console.session import Session
from console.state import NodeState, RunView, elapsed_ns
from db.database import OpenedHistory, open_history
from db.queries import History
from db.writer import Writer
from remote_agent.protocol.messages import Actor, Recipe
from remote_agent.recipe import recipe_hash

T = TypeVar("T")

CLOSE_S = 5.0

log = logging.getLogger(__name__)


class Fleet(Requests):
    """Holds a link to each node, keeps their states and the history. Create and use it on one event loop.

    ``nodes``: names of the nodes to follow, all by default. ``parallel``: how many runs
    this console lets load at once. ``links`` makes the links.
    """

    def __init__(
        self,
        config: Config,
        history_path: Path,
        *,
        nodes: Sequence[str] | None = None,
        parallel: int = 8,
        actor: Actor,
        links: LinkFactory,
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
        hashes = {name: recipe_hash(recipe) for name, recipe in self.config.recipes.items()}
        for node in self._followed:
            wanted = tuple(hashes[name] for name in node.recipes if name in hashes) or tuple(hashes.values())
            session = Session(node, self._recorder, partial(baseline, self._history), wanted, self._dirty.add)
            session.link = self._links(node, self._opened.history_uuid, self._cursor, session)
            self._sessions[node.name] = session
            self._dirty.add(node.name)
        for session in self._sessions.values():
            session.spawn(recall(self._history, session))
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

    async def until(self, name: str, wanted: Callable[[NodeState], T | None], timeout_s: float | None = None) -> T:
        """Return what ``wanted`` finds in the node's state, as soon as it finds something; no state is missed.

        Raises: TimeoutError.
        """
        return await self._session(name).until(wanted, timeout_s)

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
        unless: Unless | None = None,
    ) -> str:
        """Start a run and return its uid; where every parallel place is taken it waits, and is seen waiting.

        With ``arm`` it makes all but the weights, and its process waits for them. ``unless`` may call off one that
        waited.

        Raises: UsageError for an unknown name; NodeUnreachable with the link's reason; RequestRefused by the node.
        """
        session = self._session(node)
        recipe = recipe or self.config.recipe(recipe_name)
        run_uid = run_uid or uuid.uuid4().hex
        await session.until_connected(session.node.connect_timeout_s)
        timeout_s = session.node.connect_timeout_s + ANSWER_S
        await self._launches.launch(session, run_uid, recipe, timeout_s, arm, unless)
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

    def said(self, node: str) -> tuple[str, ...]:
        """Return what the console itself has had to say about the node since `start`, a line each."""
        return tuple(self._session(node).said)

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
