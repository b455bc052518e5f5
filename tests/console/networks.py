"""Hosts on this machine that reach each other by cables of their own: a Linux network namespace each, as root.

A namespace's name carries the pid and start of the process that made it. So the next network removes what one left
that was killed, with all that ran in it.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.needs import need, need_root

NAMED = Path("/run/netns")
_NAME = re.compile(r"glowplug-(\d+)-(\d+)-\d+")
_NUMBERS = itertools.count()
_SUBNETS = 1 << 15
"""Pairs of addresses in 198.18.0.0/15, which is for tests of networks (RFC 2544)."""


class Host:
    """One namespace with a cable to ``other``, this machine itself by default.

    ``inside`` stands before an argv that is to run there; ``address`` is its own, for whoever has a cable to it.
    """

    def __init__(self, name: str, number: int, other: Host | None) -> None:
        self.name, self._other = name, other
        self.inside = (need("ip", "iproute2"), "netns", "exec", name)
        subnet = (os.getpid() * 32 + number) % _SUBNETS
        high, low = 18 + (subnet >> 14), subnet * 4
        near, self.address = (f"198.{high}.{low >> 8 & 255}.{(low & 255) + end}" for end in (1, 2))
        self._near_end = f"gp{os.getpid()}x{number}"
        _ip("netns", "add", name)
        _ip("link", "add", self._near_end, "type", "veth", "peer", "name", "cable", "netns", name)
        if other is not None:
            _ip("link", "set", self._near_end, "netns", other.name)
        for where, device, address in ((other, self._near_end, near), (self, "cable", self.address)):
            there = ("-n", where.name) if where is not None else ()
            _ip(*there, "address", "add", f"{address}/30", "dev", device)
            _ip(*there, "link", "set", device, "up")
        _ip("-n", name, "link", "set", "lo", "up")

    def run(self, *argv: str) -> None:
        """Run a command there; skip where this kernel can't do it."""
        done = subprocess.run([*self.inside, *argv], capture_output=True, text=True, check=False, timeout=30)
        if done.returncode:
            pytest.skip(f"{' '.join(argv)}: {done.stderr.strip()}")

    @contextmanager
    def black_hole(self) -> Iterator[None]:
        """Have every packet vanish on its way, both ways, as long as this lasts."""
        with self._each_packet("-j", "DROP"):
            yield

    @contextmanager
    def lossy(self, share: float) -> Iterator[None]:
        """Have that share of all packets vanish, drawn one by one."""
        with self._each_packet("-m", "statistic", "--mode", "random", "--probability", str(share), "-j", "DROP"):
            yield

    @contextmanager
    def slow(self, rate: str = "1mbit") -> Iterator[None]:
        """Have the cable carry no more than that, both ways."""
        limit = ("root", "tbf", "rate", rate, "burst", "4kb", "latency", "500ms")
        tc = need("tc", "iproute2")
        near = [*(self._other.inside if self._other else ()), tc, "qdisc"]
        self.run(tc, "qdisc", "add", "dev", "cable", *limit)
        try:
            subprocess.run([*near, "add", "dev", self._near_end, *limit], check=True, timeout=30)
            yield
            subprocess.run([*near, "del", "dev", self._near_end, "root"], check=True, timeout=30)
        finally:
            self.run(tc, "qdisc", "del", "dev", "cable", "root")

    @contextmanager
    def _each_packet(self, *rule: str) -> Iterator[None]:
        iptables = need("iptables", "iptables")
        for chain in ("INPUT", "OUTPUT"):
            self.run(iptables, "-A", chain, *rule)
        try:
            yield
        finally:
            self.run(iptables, "-F")


class Network:
    """All hosts of one test session; `close` removes them and ends what still runs there."""

    def __init__(self) -> None:
        need_root("network namespaces")
        need("ip", "iproute2")
        sweep()
        self._prefix = f"glowplug-{os.getpid()}-{_started(os.getpid())}"
        self._hosts: list[Host] = []

    def host(self, behind: Host | None = None) -> Host:
        """Add a host that this machine reaches, or ``behind`` alone. Skips where namespaces can't be made."""
        number = next(_NUMBERS)
        name = f"{self._prefix}-{number}"
        try:
            self._hosts.append(Host(name, number, behind))
        except subprocess.CalledProcessError as error:
            remove(name)
            pytest.skip(f"no network namespaces: {' '.join(error.cmd)}: {error.stderr.strip()}")
        return self._hosts[-1]

    def close(self) -> None:
        for host in reversed(self._hosts):
            remove(host.name)
        self._hosts.clear()


def sweep() -> list[str]:
    """Remove the namespaces of processes that are no more, and return their names."""
    dead = []
    for path in NAMED.glob("glowplug-*"):
        match = _NAME.fullmatch(path.name)
        if match is not None and _started(int(match[1])) != match[2]:
            remove(path.name)
            dead.append(path.name)
    return dead


def remove(name: str) -> None:
    """End all that runs in a namespace and remove it; nothing where it is gone."""
    if not (NAMED / name).exists():
        return
    running = subprocess.run(
        [need("ip", "iproute2"), "netns", "pids", name], capture_output=True, text=True, check=False, timeout=30
    )
    for pid in running.stdout.split():
        try:
            os.kill(int(pid), signal.SIGKILL)
        except ProcessLookupError:
            pass
    # A namespace lives on while a process dies in it; the cable goes at once, and with it its address here.
    subprocess.run(
        [need("ip", "iproute2"), "-n", name, "link", "del", "cable"], capture_output=True, check=False, timeout=30
    )
    _ip("netns", "del", name)


def _started(pid: int) -> str:
    """Return when a process started, in ticks since boot; empty where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _ip(*words: str) -> None:
    subprocess.run([need("ip", "iproute2"), *words], check=True, capture_output=True, text=True, timeout=30)
