"""How bytes reach an agent: SSH, or any argv that gives stdio on the host."""

from __future__ import annotations

from console.config_nodes import Node
from console.prompts import PromptQueue
from console.transports.base import OpenStream, Stream
from console.transports.gate import Gate

__all__ = ["Gate", "OpenStream", "Stream", "open_stream"]


async def open_stream(node: Node, token: str, *, gate: Gate, prompts: PromptQueue | None = None) -> Stream:
    """Return a stream on which the node's bridge will write its mark with ``token``.

    Raises: LinkError.
    """
    if node.transport:
        from console.transports.command import open_command

        return await open_command(node, token)
    from console.transports.ssh import open_ssh

    return await open_ssh(node, token, gate, prompts)
