"""Hosts that live in a test, and the fleets that look at them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from console.config import Config
from console.config_nodes import Node
from console.fleet import Fleet
from console.session import Session
from console.state import RunView
from remote_agent.protocol.messages import ModelSource, Recipe
from tests.console.fake_host import FakeHost, FakeLink
from tests.console.happenings import ACTOR

RECIPES = {name: Recipe(name, ModelSource(f"/models/{name}")) for name in ("llama", "bert")}


NODES = ("n1", "n2", "n3")


class World:
    """Three hosts and the fleets that look at them; a short time-out, so that waiting for nobody is quick."""

    def __init__(self, directory: Path) -> None:
        self.hosts = {name: FakeHost(f"journal-{name}") for name in NODES}
        self.links: dict[str, FakeLink] = {}
        self.history_path = directory / "history.db"
        nodes = tuple(Node(name, host="h", connect_timeout_s=1.0, python=("py",)) for name in NODES)
        self.config = Config(nodes, RECIPES)

    def fleet(self, parallel: int = 8) -> Fleet:
        return Fleet(self.config, self.history_path, parallel=parallel, actor=ACTOR, links=self._link)

    def _link(self, node: Node, subscriber: str, cursor: Callable[[str], int], sink: Session) -> FakeLink:
        link = FakeLink(node, self.hosts[node.name], cursor, sink)
        self.links[node.name] = link
        return link


def view(fleet: Fleet, node: str, run_uid: str) -> RunView:
    return fleet.state(node).runs[run_uid]
