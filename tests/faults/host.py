"""The agent of a host under faults: ``host.py ORDERS VERB …``. Bridge, agentd and journal are the real ones.

Its workers are real processes that need no torch, and tell each step in the file ``steps`` of ORDERS: its name and
the worker's pid. A step lasts a moment, so that something can happen to it.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

STEP_S = 0.04
STEPS = ("init", "context", "weights", "assign", "compile", "first_request", "hold")
_SELF = str(Path(__file__).resolve())


def _bridge(orders: str, arguments: list[str]) -> int:
    from remote_agent import bridge
    from remote_agent.agentd import launch

    launch.agent_command = lambda: ((_SELF, orders), {})
    return bridge.main(arguments)


def _agentd(orders: str, arguments: list[str]) -> int:
    from remote_agent.agentd import server
    from remote_agent.agentd.commands import Commands
    from remote_agent.agentd.options import Options
    from remote_agent.agentd.paths import StateDir

    class StubCommands(Commands):
        """Starts stubs for all children but the keeper."""

        def argv(self, verb: str, python: tuple[str, ...] = ()) -> tuple[str, ...]:
            return super().argv(verb, python) if verb == "keeper" else (sys.executable, _SELF, orders, verb)

    folder = Path(orders)
    # Nothing is made ready beforehand: a process that waits for the next run costs as much as one that is started.
    options = Options(
        heartbeat_s=0.25, idle_s=3600.0, host_sample_s=60.0, devices_folder=folder / "dev", lock_folders=(folder,)
    )
    state = StateDir(Path(arguments[arguments.index("--state-dir") + 1]))
    state.prepare()
    return server.launch(state, options, StubCommands())


def _child(orders: str, arguments: list[str]) -> int:
    from tests.remote_agent.agentd import stub_children

    misbehave = stub_children.misbehave

    def linger(line: stub_children.Line, act: str, name: str) -> None:
        if act != "linger":
            misbehave(line, act, name)
            return
        with (Path(orders) / "steps").open("a") as file:
            file.write(f"{name} {os.getpid()}\n")
        time.sleep(STEP_S)

    stub_children.misbehave = linger
    os.environ["STUB_FOLDER"] = orders
    stub_children.main(arguments[0], int(arguments[2]))
    return 0


def main(argv: list[str]) -> int:
    orders, verb, *arguments = argv
    verbs = {"bridge": _bridge, "agentd": _agentd}
    return verbs[verb](orders, arguments) if verb in verbs else _child(orders, [verb, *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
