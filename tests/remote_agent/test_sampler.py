"""The sampler: one report after another, ``absent`` once, and the end when its socket closes."""

from __future__ import annotations

import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from remote_agent.devices.findings import HostPaths
from remote_agent.protocol.framing import FrameReader
from remote_agent.protocol.internal import SamplerReport, parse
from remote_agent.sampler import Sampler, serve
from tests.remote_agent.fake_nvml import UNKNOWN, FakeGpu, FakeNvml, NvmlCode, all_failing

DEADLINE_S = 20


@pytest.fixture
def paths(tmp_path: Path) -> HostPaths:
    """A host with a driver: device nodes, and a module of the library's version."""
    dev = tmp_path / "dev"
    dev.mkdir()
    (dev / "nvidiactl").symlink_to("/dev/null")
    (dev / "nvidia-uvm").symlink_to("/dev/null")
    return HostPaths(dev, tmp_path / "version", tmp_path / "maps")


@pytest.fixture
def no_driver(tmp_path: Path) -> HostPaths:
    return HostPaths(tmp_path / "dev", tmp_path / "version", tmp_path / "maps")


class Reports:
    """The reports that come over one end of a socket pair."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._reader = FrameReader()
        self._waiting: list[bytes] = []

    def next(self) -> SamplerReport | None:
        """Return the next report, or None once the other side closed."""
        deadline = time.monotonic() + DEADLINE_S
        while not self._waiting:
            assert select.select([self._sock], [], [], max(0, deadline - time.monotonic()))[0], "no report in time"
            data = self._sock.recv(1 << 16)
            if not data:
                return None
            self._waiting += self._reader.feed(data)
        message = parse(self._waiting.pop(0))
        assert isinstance(message, SamplerReport)
        return message


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_gpus_are_reported_until_the_socket_closes(paths: HostPaths, pair: tuple[socket.socket, socket.socket]) -> None:
    """Report follows report; closing the other end ends the process's work with code 0."""
    ours, theirs = pair
    nvml = FakeNvml([FakeGpu(minor=2)])
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(serve(theirs, Sampler(nvml, paths), 0.01)))
    thread.start()
    reports = Reports(ours)

    first, second = reports.next(), reports.next()
    ours.close()
    thread.join(DEADLINE_S)

    assert first is not None
    assert second is not None
    assert first.status == "nvml"
    assert first.driver_version == "580.159.03"
    assert first.gpus[0].minor == 2
    assert second.t_mono_ns > first.t_mono_ns
    assert codes == [0]
    assert nvml.inits == 1


def test_a_closed_socket_ends_a_long_wait_at_once(paths: HostPaths, pair: tuple[socket.socket, socket.socket]) -> None:
    """The end does not wait for the next report to be due."""
    ours, theirs = pair
    thread = threading.Thread(target=lambda: serve(theirs, Sampler(FakeNvml(), paths), 3600))
    thread.start()
    Reports(ours).next()

    ours.close()
    thread.join(DEADLINE_S)

    assert not thread.is_alive()


@pytest.mark.parametrize("module", [None, FakeNvml(start=12), FakeNvml(start=9)])
def test_a_host_without_a_driver_is_absent_once(
    no_driver: HostPaths, pair: tuple[socket.socket, socket.socket], module: object
) -> None:
    """No pynvml, no library, no module: where no driver shows, ``absent`` is said once and the process ends."""
    ours, theirs = pair

    assert serve(theirs, Sampler(module, no_driver), 3600) == 0

    theirs.close()
    reports = Reports(ours)
    report = reports.next()
    assert report is not None
    assert (report.status, report.gpus, report.findings) == ("absent", (), ())
    assert reports.next() is None


@pytest.mark.parametrize(
    ("module", "code"),
    [
        (None, "nvml_missing"),
        (FakeNvml(start=12), "nvml_library_missing"),
        (FakeNvml(start=18), "driver_mismatch"),
        (FakeNvml(start=UNKNOWN), "container_lost_gpus"),
        (FakeNvml(start=8), "nvml_failed"),
    ],
)
def test_a_driver_that_does_not_answer_is_failed_with_its_reason(paths: HostPaths, module: object, code: str) -> None:
    """A driver that is there and can't be asked is never called absent."""
    report = Sampler(module, paths).look()

    assert report.status == "failed"
    assert [finding.code for finding in report.findings] == [code]


def test_a_driver_that_comes_back_is_read_again(paths: HostPaths) -> None:
    """A failed start is tried again at the next look."""
    nvml = FakeNvml([FakeGpu()], start=UNKNOWN)
    sampler = Sampler(nvml, paths)
    assert sampler.look().status == "failed"

    nvml.start = 0

    assert sampler.look().status == "nvml"
    assert nvml.inits == 2


def test_gpus_that_all_vanish_mean_lost_access(paths: HostPaths) -> None:
    """NVML that only answers Unknown Error is the container's lost access, and NVML is started anew."""
    nvml = FakeNvml([FakeGpu(handle=NvmlCode(UNKNOWN)), FakeGpu(uuid=NvmlCode(UNKNOWN))])
    sampler = Sampler(nvml, paths)

    report = sampler.look()

    assert [finding.code for finding in report.findings] == ["gpu_unreadable", "gpu_unreadable", "container_lost_gpus"]
    sampler.look()
    assert (nvml.inits, nvml.shutdowns) == (2, 2)


def test_a_host_without_gpus_still_reports(paths: HostPaths) -> None:
    """A driver with no device is a report with none, not an absent driver."""
    report = Sampler(FakeNvml([]), paths).look()

    assert (report.status, report.gpus, report.findings) == ("nvml", (), ())


def test_a_gpu_that_tells_nothing_still_fits_the_wire(paths: HostPaths) -> None:
    """A report full of unknowns crosses the wire unchanged."""
    report = Sampler(FakeNvml([all_failing(3, uuid="GPU-1")]), paths).look()

    from remote_agent.protocol.internal import dump

    assert parse(dump(report)) == report


def test_the_process_reports_and_ends_with_its_socket() -> None:
    """As agentd starts it: the first report comes over the inherited descriptor, the end closes it."""
    ours, theirs = socket.socketpair()
    with ours:
        process = subprocess.Popen(
            [sys.executable, "-m", "remote_agent", "sampler", "--fd", str(theirs.fileno())], pass_fds=[theirs.fileno()]
        )
        theirs.close()
        report = Reports(ours).next()
    assert process.wait(DEADLINE_S) == 0

    assert report is not None
    assert report.status in ("absent", "nvml", "failed")
