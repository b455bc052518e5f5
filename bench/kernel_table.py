"""What a device does during one piece of work: each kernel by name, how often and how long, by torch's profiler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from remote_agent.devices import Device

NAME_CHARACTERS = 110


def profile_kernels(work: Callable[[], object], device: Device) -> dict[str, Any]:
    """Return the kernels of ``work``, those that take longest together first; on a CPU its operators.

    ``span_us``: from the first's beginning to the last's end; ``busy_us``: what they take together, which is more
    where some run side by side.
    """
    activity = ProfilerActivity.CUDA if device.kind == "cuda" else ProfilerActivity.CPU
    work()
    device.synchronise()
    with profile(activities=[activity], acc_events=True) as found:
        work()
        device.synchronise()
    is_gpu = device.kind == "cuda"
    there = torch.autograd.DeviceType.CUDA if is_gpu else torch.autograd.DeviceType.CPU
    events = [one for one in found.events() or () if one.device_type == there]
    count: Counter[str] = Counter()
    total_ns: Counter[str] = Counter()
    for one in events:
        count[one.name] += 1
        # An operator's time without that of those it calls; a kernel calls none. In whole nanoseconds.
        total_ns[one.name] += round((one.time_range.elapsed_us() if is_gpu else one.self_cpu_time_total) * 1000)
    kernels = [[name[:NAME_CHARACTERS], count[name], total / 1000] for name, total in total_ns.most_common()]
    starts, ends = [one.time_range.start for one in events], [one.time_range.end for one in events]
    return {
        "kernels": kernels,
        "count": len(events),
        "busy_us": round(sum(total_ns.values()) / 1000, 1),
        "span_us": round(max(ends) - min(starts), 1) if events else 0.0,
    }


def as_text(found: dict[str, Any]) -> str:
    """Return a table of what `profile_kernels` found."""
    head = f"{found['count']} kernels, {found['busy_us']:.0f} us together, {found['span_us']:.0f} us from first to last"
    lines = [f"{total:10.1f} us  {count:5d} x  {name}" for name, count, total in found["kernels"]]
    return "\n".join([head, *lines]) + "\n"
