"""The command that starts a bridge on a host, for whatever login shell reads it.

Inside ``sh -c '…'`` there is no single quote, backslash, ``!`` or line break, so
bash, dash, zsh, fish and csh all hand the same script to ``sh``. Every argument in
the script stands in double quotes and was checked by `shell_problem`.
"""

from __future__ import annotations

from console.config_nodes import Node, shell_problem
from console.errors import NodeMisconfigured

DEFAULT_AGENT = "$HOME/.local/share/glowplug/glowplug-agent.pyz"
"""Where an upload puts the agent; without it, the one installed in the node's Python is used."""


def build(node: Node, token: str) -> str:
    """Return one command line that any login shell runs alike.

    Raises: NodeMisconfigured if an argument could mean something to a shell.
    """
    return f"sh -c '{script(node, token)}'"


def argv(node: Node, token: str) -> tuple[str, ...]:
    """Return the node's transport argv with the same script behind it; no login shell reads this.

    Raises: NodeMisconfigured if an argument could mean something to a shell.
    """
    return (*node.transport, "sh", "-c", script(node, token))


def script(node: Node, token: str) -> str:
    """Return the POSIX script. Its stderr goes with stdout until the bridge has written its mark."""
    python = " ".join(_quote(node, item) for item in node.python)
    tail = f"bridge --mark {_quote(node, token)}"
    if node.state_directory is not None:
        tail += f" --state-dir {_quote(node, node.state_directory)}"
    if node.agent:
        agent = " ".join(_quote(node, item) for item in node.agent)
        return f"exec 2>&1; exec {python} {agent} {tail}"
    return (
        f'exec 2>&1; if [ -f "{DEFAULT_AGENT}" ]; then exec {python} "{DEFAULT_AGENT}" {tail}; '
        f"else exec {python} -m remote_agent {tail}; fi"
    )


def _quote(node: Node, item: str) -> str:
    problem = shell_problem(item)
    if problem:
        raise NodeMisconfigured(f"{node.name}: {problem}")
    return f'"$HOME/{item[2:]}"' if item.startswith("~/") else f'"{item}"'
