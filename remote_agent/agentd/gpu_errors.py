"""What a GPU's errors mean for the weights on it: after some, nothing that lies in its memory is to be trusted."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from remote_agent.agentd.files import read_json, write_whole
from remote_agent.protocol.internal import SamplerReport
from remote_agent.protocol.messages import Finding

log = logging.getLogger(__name__)

APPLICATION_XIDS = {
    13: "graphics engine exception",
    31: "memory page fault",
    43: "stopped processing",
    45: "preemptive cleanup",
    68: "video processor exception",
    109: "context switch timeout",
}
"""Errors that end the process which made them; memory of others is as it was."""

KNOWN_XIDS = {
    48: "double bit ECC error", 63: "row remapped after an ECC error", 64: "row remapping failed",
    74: "NVLink error", 79: "GPU has fallen off the bus", 94: "contained ECC error", 95: "uncontained ECC error",
    119: "GSP timeout", 120: "GSP error", 140: "unrecovered ECC error",
}  # fmt: skip


class GpuErrors:
    """Judges each of the sampler's reports. ``on_damage``: called with a GPU's UUID and why its memory is not trusted.

    How many uncorrectable errors a GPU had is kept in ``path``, so that those are seen too that happened
    while no agent ran: the keeper may have had weights there. The driver counts from zero after each of its starts.
    """

    def __init__(
        self,
        path: Path,
        boot_id: str,
        on_finding: Callable[[Finding], None],
        on_damage: Callable[[str, str], None],
    ) -> None:
        self._path, self._boot_id = path, boot_id
        self._on_finding, self._on_damage = on_finding, on_damage
        self._uncorrected = _read_counts(path, boot_id)

    def take_in(self, report: SamplerReport) -> None:
        """Look at one report."""
        for event in report.xids:
            said = APPLICATION_XIDS.get(event.xid) or KNOWN_XIDS.get(event.xid)
            text = f"Xid {event.xid}{f' ({said})' if said else ''} on {event.uuid}"
            if event.xid in APPLICATION_XIDS:
                self._on_finding(Finding("gpu_xid", "warning", f"{text}: an application's error; what is held stays"))
            else:
                self._damage(event.uuid, text)
        counts = {gpu.uuid: gpu.ecc_uncorrected for gpu in report.gpus if gpu.ecc_uncorrected is not None}
        for uuid, count in counts.items():
            new = count - self._uncorrected.get(uuid, count)
            if new > 0:
                self._damage(uuid, f"{new} uncorrectable ECC error{'s' if new > 1 else ''} on {uuid}")
        if counts.items() <= self._uncorrected.items():
            return
        self._uncorrected |= counts
        try:
            write_whole(self._path, {"boot_id": self._boot_id, "uncorrected": self._uncorrected})
        except OSError as error:
            log.warning("%s can't be written: %s", self._path, error.strerror)

    def _damage(self, uuid: str, text: str) -> None:
        reason = f"lost: {text}: reload"
        self._on_finding(Finding("gpu_error", "error", f"{text}: what is held there is dropped"))
        self._on_damage(uuid, reason)


def _read_counts(path: Path, boot_id: str) -> dict[str, int]:
    """Return the counts an agent before wrote down in this boot."""
    content = read_json(path) or {}
    counts = content.get("uncorrected")
    if content.get("boot_id") != boot_id or not isinstance(counts, dict):
        return {}
    return {uuid: count for uuid, count in counts.items() if isinstance(count, int)}
