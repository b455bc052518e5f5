"""An agent's children as tests want them: real processes that speak the internal messages, without torch.

Run as ``stub_children.py VERB --fd N``. A worker and a preflight do what the
recipe's environment says (``STUB``, words apart by blanks); a zygote and a
sampler what the files of that name in ``$STUB_FOLDER`` say, when they look, and a spare what ``spare`` says.
A sampler's numbers: bytes in use, uncorrectable errors, bytes of a process's, on each GPU.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path

from remote_agent.agentd import hostfacts
from remote_agent.agentd.paths import StateDir
from remote_agent.keeper.client import KeeperAddress, ask
from remote_agent.protocol.framing import FrameReader
from remote_agent.protocol.internal import (
    InternalMessage,
    Manifest,
    ParkGo,
    ParkJob,
    ParkReady,
    ParkReport,
    PreflightReport,
    SamplerReport,
    ShardIdentity,
    WorkerFailed,
    WorkerFinding,
    WorkerGo,
    WorkerJob,
    WorkerLostResident,
    WorkerMap,
    WorkerMapped,
    WorkerMaps,
    WorkerPrepare,
    WorkerPrepared,
    WorkerProgress,
    WorkerReady,
    WorkerRelease,
    WorkerStage,
    WorkerUnmap,
    WorkerUnmapped,
    ZygoteFork,
    ZygoteForked,
    ZygoteReady,
    ZygoteRefused,
    dump,
    parse,
)
from remote_agent.protocol.messages import Failure, Finding, Gpu, GpuProcess, StageStatus, Tier
from remote_agent.resident.manifest import write_manifest

UUIDS = ("GPU-00000000-aaaa", "GPU-11111111-bbbb")
STAGES = ("context", "weights", "assign", "compile", "first_request", "hold")
ARMED_STAGES = ("context", "assign", "compile")


def folder() -> Path:
    return Path(os.environ["STUB_FOLDER"])


def told(name: str) -> str:
    """Return what the file ``name`` says now."""
    path = folder() / name
    return path.read_text() if path.exists() else ""


class Line:
    """A blocking end of the socket to the agent; the process ends when the agent closes its own."""

    def __init__(self, fd: int) -> None:
        self.socket = socket.socket(fileno=fd)
        self._reader, self._frames = FrameReader(), list[bytes]()

    def send(self, message: InternalMessage) -> None:
        self.socket.sendall(dump(message))

    def receive(self) -> InternalMessage:
        while not self._frames:
            data, logs, _, _ = socket.recv_fds(self.socket, 65536, 1)
            if not data:
                os._exit(0)
            for log in logs:
                os.dup2(log, 1)
                os.dup2(log, 2)
                os.close(log)
            self._frames += self._reader.feed(data)
        return parse(self._frames.pop(0))

    def wait_for_end(self) -> None:
        while self.socket.recv(65536):
            pass
        os._exit(0)


def preflight(line: Line) -> None:
    job = line.receive()
    assert isinstance(job, WorkerJob)
    words = job.recipe.environment.get("STUB", "").split()
    if "preflight:die" in words:
        os.kill(os.getpid(), signal.SIGSEGV)
    if "preflight:hang" in words:
        line.wait_for_end()
    if "preflight:refuse" in words or told("preflight") == "refuse":
        failure = Failure("checkpoint_refused", "model.safetensors: tensor w ends 4 bytes past the file", "preflight")
        line.send(PreflightReport(False, (), 0, 0, None, failure))
        return
    if told("preflight") == "take the log":
        log = Path("/proc/self/fd/2").readlink()
        log.unlink()
        log.mkdir()
    found = Path(job.recipe.model.path).stat()
    shard = ShardIdentity(
        job.recipe.model.path, found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
    )
    size = next((int(word.split(":")[1]) for word in words if word.startswith("bytes:")), found.st_size)
    cached = size if "cached" in words else 0
    line.send(PreflightReport(True, (shard,), size, 7, cached, None, {"headers": 1, "pid": os.getpid()}))
    if "preflight:linger" in words:
        line.wait_for_end()


def worker(line: Line) -> None:
    made: tuple[str, ...] = ()
    while True:
        message = line.receive()
        if isinstance(message, WorkerPrepare):
            made = prepare(line)
        if isinstance(message, WorkerRelease):
            if (folder() / "keep-on-release").exists():
                (folder() / "asked-to-release").touch()
                signal.pause()
            os._exit(0)
        if isinstance(message, WorkerJob):
            if made == ("init",) and told("spare") == "die late":
                os._exit(7)
            serve(line, message, made)
            made = ARMED_STAGES if message.arm else STAGES[:-2]
            words = message.recipe.environment.get("STUB", "").split()
        if isinstance(message, (WorkerUnmap, WorkerMap)):
            move(line, message, words)


def prepare(line: Line) -> tuple[str, ...]:
    """Do what a spare does before there is a job, and return what that leaves."""
    print("a spare prepares", file=sys.stderr, flush=True)
    if told("spare") == "die":
        os._exit(7)
    while told("spare") == "wait":
        time.sleep(0.01)
    if told("spare") == "fail":
        line.send(WorkerPrepared("cuInit failed: CUDA_ERROR_NO_DEVICE (100)"))
        return ()
    line.send(WorkerPrepared())
    return ("init",)


def move(line: Line, message: WorkerUnmap | WorkerMap, words: list[str]) -> None:
    """Answer as a worker that is parked or unparked; whether the driver holds it is the park child's to play."""
    name = "unmap" if isinstance(message, WorkerUnmap) else "map"
    order = told(f"worker-{name}")
    if order == "fail":
        line.send(WorkerFailed(Failure("resident_lost", "no resident llama is held", name)))
        line.wait_for_end()
    if order == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if isinstance(message, WorkerMap):
        line.send(WorkerMapped({"map_ns": 5}))
        return
    needed = next((int(word.split(":")[1]) for word in words if word.startswith("device-bytes:")), 3000)
    problem = None
    if needed > message.host_room_bytes:
        problem = f"needs {needed} bytes of host memory, {message.host_room_bytes} are there"
    line.send(WorkerUnmapped(needed, {"unmap_ns": 7}, order or problem))


def park(line: Line) -> None:
    """Play the driver by the file ``park``: a parked process is stopped, as deaf to its socket and to SIGTERM."""
    job = line.receive()
    assert isinstance(job, ParkJob)
    order = told(f"driver-{job.action}")
    if order == "unsupported":
        untouched = "running" if job.action == "park" else "parked"
        line.send(ParkReport(untouched, {}, Failure("unsupported", "cuInit failed: CUDA_ERROR_NO_DEVICE (100)")))
        return
    if job.action == "park":
        line.send(ParkReady())
        assert isinstance(line.receive(), ParkGo)
    if order.startswith("gate"):
        (folder() / "at-the-gate").touch()
        while (folder() / "gate").exists():
            time.sleep(0.01)
    if order.startswith("die"):
        if order == "die-once":
            (folder() / f"driver-{job.action}").unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    if order in ("running", "lost"):
        line.send(
            ParkReport(order, {}, Failure(f"{job.action}_failed", "the driver refuses: CUDA_ERROR_NOT_SUPPORTED"))
        )
    elif job.action == "park":
        os.kill(job.pid, signal.SIGSTOP)
        line.send(ParkReport("parked", {"lock_ns": 1, "checkpoint_ns": 2}))
    else:
        os.kill(job.pid, signal.SIGCONT)
        line.send(ParkReport("running", {"restore_ns": 3, "unlock_ns": 4}))


def serve(line: Line, job: WorkerJob, made: tuple[str, ...]) -> None:
    """Do one job; ``made``: the stages that an earlier one left."""
    words = job.recipe.environment.get("STUB", "").split()
    if "deaf" in words:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "chatty" in words or told("worker") == "chatty":
        print("first line\n\x1b[31mlast\x07 line", file=sys.stderr, flush=True)
    stage(line, "init", words, job, bool(made), job.init_mono_ns)
    made = () if made == ("init",) else made
    go = line.receive()
    if isinstance(go, WorkerRelease):
        os._exit(0)
    assert isinstance(go, WorkerGo)
    is_resident = go.is_resident
    if is_resident and "lost" in words:
        ask(keeper_of(job), f"drop! {go.resident}")
        line.send(WorkerLostResident(go.resident or "", "lost: reload: as the stub was told"))
        is_resident = False
    if job.arm:
        for name in (*ARMED_STAGES, "hold"):
            stage(line, name, words, job, name in made, time.monotonic_ns())
        line.send(WorkerReady(None, "", Tier.ARMED, 100))
        return
    if job.recipe.target_tier == "host":
        line.send(WorkerFinding(Finding("stub_registered", "info", f"{go.registered_bytes} bytes of others")))
        register(line, job, words, bool(made))
        return
    for name in STAGES:
        has_it = name in made or (is_resident and name == "weights")
        stage(line, name, words, job, has_it, time.monotonic_ns())
    keeps = job.recipe.target_tier == "resident" or "keeps" in words
    if keeps and not is_resident:
        put_resident(job, go)
    tier = Tier.RESIDENT if job.recipe.target_tier == "resident" else Tier.STANDBY
    line.send(WorkerReady(time.monotonic_ns(), "42", tier, 1000, go.resident if keeps or is_resident else None))


def register(line: Line, job: WorkerJob, words: list[str], is_reused: bool) -> None:
    """Do what a ``host`` run does: no stage of a model; with ``refused`` nothing is registered."""
    for name in ("context", "weights"):
        stage(line, name, words, job, is_reused, time.monotonic_ns())
    if "refused" in words:
        line.send(WorkerFinding(Finding("not_registered", "warning", "cached instead of host: as the stub was told")))
        line.send(WorkerReady(None, "", Tier.CACHED, 1000, is_held=False))
        return
    stage(line, "hold", words, job, False, time.monotonic_ns())
    line.send(WorkerReady(None, "", Tier.HOST, 4096))


def keeper_of(job: WorkerJob) -> KeeperAddress:
    assert job.state_directory is not None
    return KeeperAddress(StateDir(Path(job.state_directory)))


def put_resident(job: WorkerJob, go: WorkerGo) -> None:
    """Give the keeper a resident as a worker would, without weights in it."""
    recipe = job.recipe
    manifest = Manifest(
        go.resident or "", job.run_uid, recipe.name, recipe.model.path, go.shards, job.device, hostfacts.boot_id(),
        job.owner, 1000, 0, time.time_ns(), recipe.hold.ttl_s, "",
    )  # fmt: skip
    descriptors = [write_manifest(manifest, ()), os.memfd_create("weights", os.MFD_CLOEXEC)]
    ask(keeper_of(job), f"put {go.resident}", descriptors)
    for descriptor in descriptors:
        os.close(descriptor)


def stage(line: Line, name: str, words: list[str], job: WorkerJob, is_reused: bool, start_ns: int) -> None:
    if is_reused:
        line.send(WorkerStage(name, StageStatus.REUSED, start_ns, time.monotonic_ns(), reason="the standby has it"))
        return
    line.send(WorkerStage(name, StageStatus.RUNNING, start_ns))
    for word in words:
        act, _, where = word.partition(":")
        where, _, which = where.partition("@")
        if where == name and which in ("", job.device):
            misbehave(line, act, name)
    if name == "weights":
        line.send(WorkerProgress(name, 500, 1000, rate_bytes_s=10.0))
        line.send(WorkerFinding(Finding("stub", "info", "half way")))
    size = 1000 if name == "weights" else None
    line.send(
        WorkerStage(
            name, StageStatus.DONE, start_ns, time.monotonic_ns(), size, None, None, None, None, {"pid": os.getpid()}
        )
    )


def misbehave(line: Line, act: str, name: str) -> None:
    if act == "hang":
        line.wait_for_end()
    elif act == "sigkill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif act == "sigsegv":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif act == "sigbus":
        line.send(WorkerMaps(name, "/models/cut.safetensors"))
        os.kill(os.getpid(), signal.SIGBUS)
    elif act == "exit":
        os._exit(3)
    elif act == "fail":
        line.send(WorkerFailed(Failure("stage_failed", f"RuntimeError: {name} went wrong", name)))
        line.wait_for_end()
    elif act == "garbage":
        line.socket.sendall(b"this is no message\n")
        line.wait_for_end()
    elif act == "nonsense":
        line.send(WorkerStage("queue", StageStatus.DONE, 0, 1))
        line.wait_for_end()
    elif act == "wait":
        while not (folder() / "go-on").exists():
            time.sleep(0.01)
    elif act == "gate":
        while (folder() / "gate").exists():
            time.sleep(0.01)


def zygote(line: Line) -> None:
    if "die" in told("zygote"):
        print("ModuleNotFoundError: No module named 'torch'", file=sys.stderr, flush=True)
        sys.exit(1)
    while "slow" in told("zygote"):
        time.sleep(0.01)
    packages = folder() / "packages"
    line.send(ZygoteReady(os.getpid(), sys.executable, {"python": "3"}, 1, 1, (str(packages),)))
    reader = FrameReader()
    held: list[int] = []
    while True:
        data, descriptors, _, _ = socket.recv_fds(line.socket, 65536, 8, socket.MSG_CMSG_CLOEXEC)
        held += descriptors
        if not data:
            os._exit(0)
        for frame in reader.feed(data):
            request = parse(frame)
            assert isinstance(request, ZygoteFork)
            given, held = held[:2], held[2:]
            line.send(answer_fork(line, given, request))
            for descriptor in given:
                os.close(descriptor)


def answer_fork(line: Line, given: list[int], request: ZygoteFork) -> InternalMessage:
    if "refuse" in told("zygote"):
        return ZygoteRefused("9 threads where imports leave 1")
    if "mute" in told("zygote"):
        line.wait_for_end()
    reading, writing = os.pipe()
    middle = os.fork()
    if middle == 0:
        pid = os.fork()
        if pid == 0:
            os.setsid()
            line.socket.close()
            os.close(writing)
            os.dup2(given[1], 1)
            os.dup2(given[1], 2)
            os.environ.update(request.environment)
            worker(Line(given[0]))
        os.write(writing, str(pid).encode())
        os._exit(0)
    os.close(writing)
    pid = int(os.read(reading, 32))
    os.close(reading)
    os.waitpid(middle, 0)
    return ZygoteForked(pid)


def sampler(line: Line) -> None:
    while True:
        order = told("sampler") or "absent"
        if order == "absent":
            line.send(SamplerReport("absent", time.monotonic_ns()))
            return
        if order == "die":
            sys.exit(5)
        if order != "silent":
            words = [int(word) for word in order.split()[1:]]
            used, uncorrected = (words + [10**9, 0][len(words) :])[:2]
            processes = (GpuProcess(4242, words[2] if len(words) > 2 else used, "trainer"),)
            gpus = [
                Gpu(uuid, index, "Stub GPU", index, 8 * 10**9, used, processes=processes, ecc_uncorrected=uncorrected)
                for index, uuid in enumerate(UUIDS)
            ]
            findings = (Finding("stub_ecc", "warning", "a GPU has seen better days"),)
            line.send(SamplerReport("ok", time.monotonic_ns(), "580.1", "13.0", tuple(gpus), findings))
        time.sleep(0.05)


def main(argv: list[str]) -> None:
    verbs = {"preflight-child": preflight, "park-child": park, "worker": worker, "zygote": zygote, "sampler": sampler}
    verbs[argv[0]](Line(int(argv[2])))


if __name__ == "__main__":
    main(sys.argv[1:])
