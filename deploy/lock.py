"""Prints what the environment holds of ``glowplug[local,dev]`` and all it needs, pinned, for requirements/dev.txt.

Local version tags are dropped (``2.13.0+cpu`` becomes ``2.13.0``), so that the pin fits every build of a
release, and what exists for Linux alone says so. Packages that nothing of ours needs are left out.
"""

from __future__ import annotations

import re
import sys
from collections import deque
from importlib.metadata import PackageNotFoundError, distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOTS = "glowplug[local,dev]"
LINUX_ONLY = ("cuda-bindings", "cuda-core", "cuda-pathfinder", "cuda-python")
NOT_PINNED = re.compile(r"pip|triton|cuda-toolkit|nvidia-(?!ml-py$).*")
"""pip comes with the environment; the rest a CUDA build of torch pins itself, and a CPU build has none of it."""


def pins(root: str) -> list[str]:
    """Return a sorted line for each installed distribution that ``root`` needs, itself left out.

    Raises: PackageNotFoundError if something that is needed here is not installed.
    """
    found: dict[str, str] = {}
    asked: set[tuple[str, str]] = set()
    waiting = deque([Requirement(root)])
    while waiting:
        requirement = waiting.popleft()
        package = distribution(requirement.name)
        name = package.metadata["Name"]
        found[name] = Version(package.version).public
        for extra in ("", *requirement.extras):
            if (name, extra) in asked:
                continue
            asked.add((name, extra))
            needs = (Requirement(text) for text in package.requires or ())
            waiting += [need for need in needs if need.marker is None or _wanted(need, extra)]
    del found[Requirement(root).name]
    kept = sorted(((name, version) for name, version in found.items() if not NOT_PINNED.fullmatch(name)), key=_by_name)
    return [f"{name}=={version}{_platform(name)}" for name, version in kept]


def _wanted(need: Requirement, extra: str) -> bool:
    return need.marker is not None and need.marker.evaluate({"extra": extra})


def _platform(name: str) -> str:
    return '; sys_platform == "linux"' if name in LINUX_ONLY else ""


def _by_name(item: tuple[str, str]) -> str:
    return canonicalize_name(item[0])


if __name__ == "__main__":
    try:
        lines = pins(ROOTS)
    except PackageNotFoundError as error:
        sys.exit(f"make lock: {error.name} is needed and not installed")
    print("\n".join(lines))
