"""What an operator should know about a host's GPUs before a run fails on it. Nothing is ever changed here."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from remote_agent.devices.nvml import UNKNOWN_ERROR, VERSION_MISMATCH
from remote_agent.devices.visible import HostGpu, visible_devices
from remote_agent.protocol.messages import Finding, Gpu

VERSION = re.compile(r"\b(\d{3,4}\.\d+(?:\.\d+)?)\b")


@dataclass(frozen=True)
class HostPaths:
    """Where the driver shows itself."""

    dev: Path = Path("/dev")
    module_version: Path = Path("/proc/driver/nvidia/version")
    maps: Path = Path("/proc/self/maps")

    def has_driver(self) -> bool:
        """Tell whether a kernel module or a device node is there."""
        return self.module_version.exists() or (self.dev / "nvidiactl").exists()


def explain_failed_start(code: int, paths: HostPaths) -> Finding:
    """Return what an ``nvmlInit`` that failed with ``code`` means for this host."""
    if code == VERSION_MISMATCH:
        return _mismatch(module_version(paths), library_version(paths), is_serving=False)
    if code == UNKNOWN_ERROR:
        return lost_access(paths)
    return Finding("nvml_failed", "error", f"NVML does not start: error {code}")


def lost_access(paths: HostPaths) -> Finding:
    """Return what it means that NVML answers with Unknown Error alone."""
    evidence = "/dev/nvidiactl is denied" if _is_denied(paths.dev / "nvidiactl") else "NVML says Unknown Error"
    text = (
        f"this container lost device cgroup access to its GPUs ({evidence}), as after a systemctl daemon-reload "
        "on the host: recreate it; the host itself is likely well"
    )
    return Finding("container_lost_gpus", "error", text)


def host_findings(gpus: tuple[Gpu, ...], paths: HostPaths) -> Iterator[Finding]:
    """Yield findings of a host whose NVML answers."""
    module, library = module_version(paths), library_version(paths)
    if module is not None and library is not None and module != library:
        yield _mismatch(module, library, is_serving=True)
    if gpus and not _is_character_device(paths.dev / "nvidia-uvm"):
        text = (
            "/dev/nvidia-uvm is missing: cuInit will fail (999) although NVML answers; "
            "run 'nvidia-modprobe -c 0 -u' on the host, or pass the device into the container"
        )
        yield Finding("uvm_missing", "error", text)
    for gpu in gpus:
        yield from _gpu_findings(gpu)
    off = [str(gpu.index) for gpu in gpus if gpu.persistence is False]
    if off:
        text = (
            f"persistence mode is off on GPU {', '.join(off)}: the first start after a pause initialises the driver "
            "again, which takes seconds; nvidia-persistenced keeps it loaded"
        )
        yield Finding("persistence_off", "info", text)


def visible_finding(value: str, gpus: Sequence[Gpu]) -> Finding:
    """Return which GPUs CUDA_VISIBLE_DEVICES=``value`` leaves to a process, by physical index and UUID."""
    if value.startswith("MIG-"):  # which slices there are is not known here
        return Finding("visible_devices", "info", f"CUDA_VISIBLE_DEVICES={value[:200]!r} names a MIG slice")
    uuids = {gpu.index: gpu.uuid for gpu in gpus}
    found = visible_devices(
        value, [HostGpu(uuids.get(index, "unknown")) for index in range(max(uuids, default=-1) + 1)]
    )
    left = ", ".join(f"GPU {device.index} ({device.uuid})" for device in found.devices) or "no GPU"
    text = f"CUDA_VISIBLE_DEVICES={value[:200]!r} leaves {left} to what is started from here"
    if found.problem is not None:
        text += f"; {found.problem}"
    return Finding("visible_devices", "info" if found.devices else "warning", text)


def module_version(paths: HostPaths) -> str | None:
    """Return the version of the loaded kernel module."""
    try:
        found = VERSION.search(paths.module_version.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    return found[1] if found else None


def library_version(paths: HostPaths) -> str | None:
    """Return the version of the NVML library that a process started now would load."""
    try:
        maps = paths.maps.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    mapped = re.search(r"(/\S*/)libnvidia-ml\.so\.([0-9.]+)( \(deleted\))?$", maps, re.MULTILINE)
    if mapped is None:
        return None
    try:
        target = os.path.realpath(Path(mapped[1]) / "libnvidia-ml.so.1", strict=True)
        found = re.search(r"libnvidia-ml\.so\.(\d+\.[0-9.]+)$", target)
    except OSError:
        return None
    return found[1] if found else None


def _gpu_findings(gpu: Gpu) -> Iterator[Finding]:
    who = f"GPU {gpu.index} ({gpu.uuid})"
    if gpu.compute_mode == "prohibited":
        yield Finding("compute_prohibited", "error", f"{who}: compute mode is Prohibited: no context can be created")
    elif gpu.compute_mode in ("exclusive_process", "exclusive_thread"):
        holders = ", ".join(str(process.pid) for process in gpu.processes)
        text = f"{who}: compute mode is Exclusive: one process may have a context"
        if holders:
            text += f", and process {holders} has it: a run will fail with 'devices are busy or unavailable'"
        yield Finding("exclusive_mode", "warning" if holders else "info", text)
    if gpu.ecc_uncorrected:
        text = f"{who}: {gpu.ecc_uncorrected} uncorrectable ECC errors since the driver was loaded"
        yield Finding("ecc_uncorrected", "warning", text)
    if gpu.mig:
        text = f"{who}: MIG is on: name a slice by its MIG UUID; the whole GPU can't be used"
        yield Finding("mig_on", "info", text)


def _mismatch(module: str | None, library: str | None, *, is_serving: bool) -> Finding:
    versions = f"kernel module {module or 'unknown'}, library {library or 'unknown'}"
    if is_serving:
        text = f"the driver was upgraded under running processes ({versions}): a restart will fail until reboot"
        return Finding("driver_mismatch", "warning", text)
    text = f"Driver/library version mismatch ({versions}): nothing new can start on the GPUs until reboot"
    return Finding("driver_mismatch", "error", text)


def _is_denied(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
    except OSError as error:
        return error.errno in (errno.EPERM, errno.EACCES)
    return False


def _is_character_device(path: Path) -> bool:
    try:
        return stat.S_ISCHR(path.stat().st_mode)
    except OSError:
        return False
