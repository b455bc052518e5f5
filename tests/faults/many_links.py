"""``make bench-links``: one console, hundreds of links behind real sshds; connect, stall, memory, and a storm.

A host is a network namespace with an sshd of its own; every one of its nodes is a login there, whose agent is a stub
that says hello and beats its heart. With ``--bastion`` all hosts are reached through one more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from console.config import Config
from console.config_nodes import Node
from console.fleet import Fleet
from console.heap import settled_heap
from console.links import real_links
from console.session import Link, Session
from console.state import LinkState, LinkStatus
from console.transports import Gate
from remote_agent.protocol.messages import Actor
from tests.console.networks import Host, Network
from tests.console.sshd import Sshd
from tests.faults.loop_watch import Watched, watched_loop

PATIENCE_S = 300.0
BUCKET_S = 0.5
STORMS = 3
"""What a lost connection leaves is cleared away by the next storm's collections, not always by its own."""


@dataclass
class Moments:
    """When links changed, seconds of the monotonic clock: node, state."""

    seen: list[tuple[float, str, LinkStatus]] = field(default_factory=list)

    def first(self, status: LinkStatus, after_s: float) -> list[float]:
        """Return for each node when it first had ``status`` after a time, counted from that time."""
        found: dict[str, float] = {}
        for at_s, node, seen in self.seen:
            if seen is status and at_s >= after_s:
                found.setdefault(node, at_s - after_s)
        return sorted(found.values())


class _Noting:
    """A sink that notes when a link changes, and is else the session it stands for."""

    def __init__(self, session: Session, moments: Moments) -> None:
        self._session, self._moments = session, moments

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def link_changed(self, link: LinkState) -> None:
        self._moments.seen.append((time.monotonic(), self._session.node.name, link.status))
        self._session.link_changed(link)


class Crowd:
    """``hosts`` servers with ``count`` nodes among them."""

    def __init__(self, directory: Path, count: int, hosts: int, behind_bastion: bool) -> None:
        self.network = Network()
        self.servers: list[Sshd] = []
        try:
            front = self.network.host() if behind_bastion else None
            self.bastion = self._serve(directory / "bastion", front) if front is not None else None
            places = [self.network.host(behind=front) for _ in range(hosts)]
            targets = [self._serve(directory / f"host-{number}", place) for number, place in enumerate(places)]
            self.nodes = tuple(self._node(number, targets[number % hosts]) for number in range(count))
        except BaseException:
            self.close()
            raise

    def _serve(self, directory: Path, host: Host) -> Sshd:
        server = Sshd(directory, address=host.address, inside=host.inside)
        self.servers.append(server)
        return server.start()

    def _node(self, number: int, server: Sshd) -> Node:
        hops: dict[str, Any] = (
            {"jump": ("bastion",), "hops": (self.bastion.node("bastion"),)} if self.bastion is not None else {}
        )
        return server.node(f"gpu-{number + 1}", heartbeat_s=2.0, **hops)

    def kill(self) -> None:
        for server in self.servers:
            server.stop()

    def revive(self) -> None:
        for server in self.servers:
            server.start()

    def close(self) -> None:
        self.kill()
        self.network.close()


async def measure(crowd: Crowd, directory: Path) -> dict[str, object]:
    """Return connect times, stalls and memory of a first connect and of a storm after every server died."""
    moments = Moments()
    make = real_links(Gate(directory / "known_hosts", directory, account_home=directory))

    def link(node: Node, subscriber: str, cursor: Callable[[str], int], sink: Session) -> Link:
        return make(node, subscriber, cursor, _Noting(sink, moments))  # type: ignore[arg-type]

    config = Config(crowd.nodes, {})
    before_bytes = rss_bytes()
    async with Fleet(config, directory / "history.db", actor=Actor("ada", "desk"), links=link) as fleet:
        with watched_loop() as first:
            began_s = time.monotonic()
            await _until(fleet, lambda status: status is LinkStatus.CONNECTED)
        connected = moments.first(LinkStatus.CONNECTED, began_s)
        memory_bytes = rss_bytes() - before_bytes
        with watched_loop() as idle:
            await asyncio.sleep(5)
        storms = [await _storm(crowd, fleet, moments) for _ in range(STORMS)]
    return {
        "links": len(crowd.nodes),
        "connect": spread(connected),
        "first_connect_loop": loop(first),
        "idle_loop_5_s": loop(idle),
        "memory_bytes": memory_bytes,
        "memory_bytes_a_link": round(memory_bytes / len(crowd.nodes)),
        "storms": storms,
    }


async def _storm(crowd: Crowd, fleet: Fleet, moments: Moments) -> dict[str, object]:
    """Kill every server, start them again once every link is lost, and return how they came back."""
    lost_s = time.monotonic()
    with watched_loop() as watched:
        await asyncio.to_thread(crowd.kill)
        await _until(fleet, lambda status: status is not LinkStatus.CONNECTED)
        await asyncio.to_thread(crowd.revive)
        revived_s = time.monotonic()
        await _until(fleet, lambda status: status is LinkStatus.CONNECTED)
    back = moments.first(LinkStatus.CONNECTED, revived_s)
    return {
        "connected_again": spread(back),
        "loop": loop(watched),
        "first_tries_after_the_kill": histogram(moments.first(LinkStatus.CONNECTING, lost_s)),
        "connected_after_the_servers_came_back": histogram(back),
    }


async def _until(fleet: Fleet, holds: Callable[[LinkStatus], bool]) -> None:
    late_s = time.monotonic() + PATIENCE_S
    while not all(holds(fleet.state(name).link.status) for name in fleet.nodes):
        if time.monotonic() > late_s:
            counts = Counter(fleet.state(name).link.status.value for name in fleet.nodes)
            reasons = Counter(fleet.state(name).link.reason for name in fleet.nodes)
            raise TimeoutError(f"{counts}: {reasons.most_common(5)}")
        await asyncio.sleep(0.02)


def spread(times_s: Sequence[float]) -> dict[str, float]:
    """Return the median and the extremes, in seconds."""
    named = {"first_s": times_s[0], "median_s": times_s[len(times_s) // 2], "last_s": times_s[-1]}
    return {name: round(value, 3) for name, value in named.items()}


def loop(watched: Watched) -> dict[str, object]:
    worst = [f"{taken_ns / 1e6:.1f} ms {name}" for taken_ns, name in sorted(watched.longest, reverse=True)]
    return {
        "longest_ms": round(watched.longest_ns / 1e6, 1),
        "callbacks": watched.count,
        "cpu_s": round(watched.total_ns / 1e9, 2),
        "worst": worst,
    }


def histogram(times_s: Sequence[float]) -> dict[str, int]:
    """Return how many fell into each half second in which there were any, by its beginning."""
    counts = Counter(int(at_s / BUCKET_S) for at_s in times_s)
    return {f"{bucket * BUCKET_S:.1f} s": counts[bucket] for bucket in sorted(counts)}


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.many_links", description=__doc__)
    parser.add_argument("--links", type=int, default=300)
    parser.add_argument("--hosts", type=int, default=6)
    parser.add_argument("--bastion", action="store_true", help="reach all of them through one host")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4096)), hard))
    folder = Path(tempfile.mkdtemp(prefix="glowplug-links-"))
    try:
        crowd = Crowd(folder, options.links, options.hosts, options.bastion)
        try:
            with settled_heap():
                figures = asyncio.run(measure(crowd, folder))
        finally:
            crowd.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    machine = {"system": platform.platform(), "python": platform.python_version(), "cpus": os.cpu_count()}
    content = {"hosts": options.hosts, "bastion": options.bastion, **figures, "machine": machine}
    print(json.dumps(content, indent=2))
    if options.out is not None:
        options.out.write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
