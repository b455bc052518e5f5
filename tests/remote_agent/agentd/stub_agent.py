"""The real agent in a process of its own, with stub children. ``stub_agent.py STATE_DIR STUB_FOLDER OPTIONS_JSON``."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from remote_agent.agentd import server
from remote_agent.agentd.commands import Commands
from remote_agent.agentd.journal import JournalLimits
from remote_agent.agentd.options import ClientLimits, Options
from remote_agent.agentd.paths import StateDir
from remote_agent.agentd.reaper import Reaper
from remote_agent.agentd.sampling import SamplerTimes
from remote_agent.agentd.zygotes import ZygoteTimes
from remote_agent.protocol.budget import parse_budget

STUBS = Path(__file__).with_name("stub_start.py")


class StubCommands(Commands):
    """Starts stubs for everything but the keeper, which is the real one, and what the file ``real`` names."""

    def argv(self, verb: str, python: tuple[str, ...] = ()) -> tuple[str, ...]:
        order = Path(os.environ["STUB_FOLDER"]) / "real"
        if verb == "keeper" or (order.exists() and verb in order.read_text().split()):
            return super().argv(verb, python)
        return (*(python or (sys.executable,)), "-S", str(STUBS), verb)


def kill_unless_told(folder: Path) -> Callable[[int, int], None]:
    """Return a ``kill`` that does nothing while a file ``unkillable`` is there, as for a process stuck in a driver."""

    def kill(pid: int, number: int) -> None:
        if not (folder / "unkillable").exists():
            os.kill(pid, number)

    return kill


def make_options(raw: dict[str, Any], folder: Path) -> Options:
    parts = {"journal": JournalLimits, "sampler": SamplerTimes, "zygote": ZygoteTimes, "clients": ClientLimits}
    nested = {name: cls(**raw.pop(name)) for name, cls in parts.items() if name in raw}
    nested["hold_budgets"] = tuple(map(parse_budget, raw.pop("hold_budgets", ())))
    nested["lock_folders"] = tuple(map(Path, raw.pop("lock_folders", (folder / "locks",))))
    return Options(**{"devices_folder": folder / "dev", **raw, **nested})


def main() -> int:
    state, folder = StateDir(Path(sys.argv[1])), Path(sys.argv[2])
    os.environ["STUB_FOLDER"] = str(folder)
    options = make_options(json.loads(sys.argv[3]), folder)
    state.prepare()
    return server.launch(state, options, StubCommands(), Reaper(kill_unless_told(folder)), foreground=True)


if __name__ == "__main__":
    sys.exit(main())
