"""The NVIDIA device files: open, they keep the driver's state loaded."""

from __future__ import annotations

import os
import re
from pathlib import Path

from remote_agent.keeper.complaint import complain

_DEVICE = re.compile(r"nvidia(ctl|\d+)")


def device_files(folder: Path) -> list[Path]:
    """Return the files that keep the driver loaded: the control device and one for each GPU's minor number."""
    try:
        return sorted(path for path in folder.iterdir() if _DEVICE.fullmatch(path.name))
    except OSError:
        return []


class DeviceHold:
    """The device files that are open."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: dict[str, int] = {}

    @property
    def count(self) -> int:
        return len(self._held)

    def hold(self) -> None:
        """Open every device file that is there and not open yet."""
        for path in device_files(self._folder):
            if path.name not in self._held:
                try:
                    self._held[path.name] = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                except OSError as error:
                    complain(f"{path}: {error.strerror}")

    def release(self) -> None:
        """Close every device file, so that the driver may be unloaded."""
        while self._held:
            os.close(self._held.popitem()[1])
