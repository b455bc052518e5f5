"""A node's hardware in one line: its GPUs, folded where there are many, or its CPUs. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from console.format import bar, size_pair
from console.state import NodeState
from console.widgets.paint import Line, Moment, Piece, choose
from remote_agent.protocol.messages import Gpu, GpuSample, HostSample, Probe

BUSY_PERCENT = 5

_SAMPLER_WORDS = {
    "nvml": "",
    "absent": "no NVIDIA driver",
    "hung": "driver hangs",
    "starting": "asking the driver",
    "failed": "driver can't be asked",
}


@dataclass(frozen=True)
class GpuFigures:
    """One GPU's newest figures; None is what the driver does not tell."""

    name: str
    used_bytes: int | None
    total_bytes: int | None
    utilisation: int | None
    temperature_c: int | None


def gpu_figures(state: NodeState) -> tuple[GpuFigures, ...]:
    """Return every GPU of the probe, brought up to date by the newest sample of the same UUID."""
    if state.probe is None:
        return ()
    samples = {sample.uuid: sample for sample in state.host.gpus} if state.host else {}
    return tuple(_figures(gpu, samples.get(gpu.uuid)) for gpu in state.probe.gpus)


def _figures(gpu: Gpu, sample: GpuSample | None) -> GpuFigures:
    if sample is None:
        return GpuFigures(gpu.name, gpu.memory_used_bytes, gpu.memory_total_bytes, gpu.utilisation, gpu.temperature_c)
    total = sample.memory_total_bytes if sample.memory_total_bytes is not None else gpu.memory_total_bytes
    return GpuFigures(gpu.name, sample.memory_used_bytes, total, sample.utilisation, sample.temperature_c)


def short_gpu_name(name: str) -> str:
    """``NVIDIA H200`` is ``H200``."""
    for prefix in ("NVIDIA ", "Tesla ", "GeForce "):
        name = name.removeprefix(prefix)
    return name or "GPU"


def hardware_line(state: NodeState, width: int, moment: Moment) -> Line:
    """Return names, memory, utilisation and temperature, as much of it as ``width`` holds."""
    probe = state.probe
    if probe is None:
        return choose([[("hardware not asked yet", "muted")]], width, moment.glyphs)
    gpus = gpu_figures(state)
    parts = _gpu_parts(gpus, probe, width, moment) if gpus else _cpu_parts(probe, state.host)
    options = [_joined(parts[: len(parts) - dropped]) for dropped in range(len(parts))]
    return choose(options, width, moment.glyphs)


def _joined(parts: list[Line]) -> Line:
    line: list[Piece] = []
    for part in parts:
        if line:
            line.append(("  ", "text"))
        line.extend(part)
    return tuple(line)


def _gpu_parts(gpus: tuple[GpuFigures, ...], probe: Probe, width: int, moment: Moment) -> list[Line]:
    names = Counter(short_gpu_name(gpu.name) for gpu in gpus)
    parts: list[Line] = [((" + ".join(f"{name} ×{count}" for name, count in names.items()), "strong"),)]
    if probe.sampler != "nvml":
        parts.append(((_SAMPLER_WORDS[probe.sampler], "warning"),))
    if memory := _memory(gpus):
        parts.append(_memory_part(*memory, width, moment))
    if (load := _load_words(gpus)) is not None:
        parts.append(((load, "text"),))
    if heat := _heat_words(gpus):
        parts.append(((heat, "muted"),))
    return parts


def _memory(gpus: tuple[GpuFigures, ...]) -> tuple[int, int] | None:
    known = [(gpu.used_bytes, gpu.total_bytes) for gpu in gpus]
    pairs = [(used, total) for used, total in known if used is not None and total]
    return (sum(used for used, _ in pairs), sum(total for _, total in pairs)) if pairs else None


def _memory_part(used: int, total: int, width: int, moment: Moment) -> Line:
    words: Piece = (size_pair(used, total), "text")
    if width < 44:
        return (words,)
    filled, empty = bar(used / total, min(16, width - 38), ascii_only=moment.glyphs.ascii_only)
    return ((filled, "bar-before"), (empty, "bar-back"), (" ", "text"), words)


def _load_words(gpus: tuple[GpuFigures, ...]) -> str | None:
    known = [gpu.utilisation for gpu in gpus if gpu.utilisation is not None]
    if not known:
        return None
    if len(gpus) == 1:
        return f"{known[0]:2d} %"
    return f"{sum(value >= BUSY_PERCENT for value in known)} busy"


def _heat_words(gpus: tuple[GpuFigures, ...]) -> str | None:
    known = [gpu.temperature_c for gpu in gpus if gpu.temperature_c is not None]
    if not known:
        return None
    low, high = min(known), max(known)
    return f"{high} °C" if low == high else f"{low}–{high} °C"


def _cpu_parts(probe: Probe, host: HostSample | None) -> list[Line]:
    total = host.memory_total_bytes if host else probe.memory_total_bytes
    available = host.memory_available_bytes if host else probe.memory_available_bytes
    parts: list[Line] = [((f"CPU ×{probe.cpu_count}", "strong"),)]
    if total:
        parts.append(((size_pair(total - available, total), "text"),))
    if host is not None:
        parts.append(((f"load {host.load_1m:.1f}", "text"),))
    if words := _SAMPLER_WORDS[probe.sampler]:
        parts.append(((words, "muted" if probe.sampler == "absent" else "warning"),))
    return parts
