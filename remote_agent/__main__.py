"""``python -m remote_agent VERB``: the agent's command line. Imports a verb's module only when it is asked for."""

from __future__ import annotations

import importlib
import sys

from remote_agent import __version__

VERBS = {
    "bridge": ("remote_agent.bridge", "stdio to the agent's socket; starts the agent when it is not running"),
    "probe": ("remote_agent.verbs.probe", "what this host is: GPUs, driver, memory"),
    "preflight": ("remote_agent.verbs.preflight", "check a checkpoint without touching a GPU"),
    "load": ("remote_agent.verbs.load", "load a checkpoint onto a device and time it"),
    "run": ("remote_agent.verbs.run", "warm a recipe through every stage, without a console"),
    "status": ("remote_agent.verbs.status", "what runs and what is held here"),
    "release": ("remote_agent.verbs.release", "let go of warm models, or of the driver"),
    "stop": ("remote_agent.verbs.stop", "end the agent"),
}
"""Verbs for people: module (with ``main(argv) -> int``) and one line of help."""

CHILDREN = {
    "agentd": "remote_agent.agentd.server",
    "keeper": "remote_agent.keeper",
    "sampler": "remote_agent.sampler",
    "zygote": "remote_agent.zygote",
    "worker": "remote_agent.worker",
    "preflight-child": "remote_agent.pipeline.preflight",
}
"""Processes the agent starts itself."""


def main(argv: list[str] | None = None) -> int:
    """Run one verb and return its exit code; 2 for a usage error."""
    arguments = sys.argv[1:] if argv is None else argv
    if arguments[:1] == ["--version"]:
        print(f"glowplug-agent {__version__}")
        return 0
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return 0 if arguments else 2
    verb = arguments[0]
    module = VERBS[verb][0] if verb in VERBS else CHILDREN.get(verb)
    if module is None:
        print(f"glowplug-agent: no such verb: {verb}\n\n{_usage()}", file=sys.stderr)
        return 2
    result: int = importlib.import_module(module).main(arguments[1:])
    return result


def _usage() -> str:
    lines = [f"  {verb:<10} {text}" for verb, (_, text) in VERBS.items()]
    return "usage: python -m remote_agent VERB [...]   (VERB --help says more)\n\n" + "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
