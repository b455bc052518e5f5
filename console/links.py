"""How links to nodes are made outside of tests: over SSH, or over a node's own transport."""

from __future__ import annotations

from collections.abc import Callable

from console.config_nodes import Node
from console.session import Link, Session
from console.transports.base import Prompts, Stream
from console.transports.gate import Gate

LinkFactory = Callable[[Node, str, Callable[[str], int], Session], Link]
"""``(node, subscriber, cursor, sink)``."""


def real_links(gate: Gate, prompts: Prompts | None = None) -> LinkFactory:
    """Return what makes links over SSH, or over a node's own transport."""
    from console.link import NodeLink
    from console.transports.command import open_command
    from console.transports.ssh import open_ssh

    def make(node: Node, subscriber: str, cursor: Callable[[str], int], sink: Session) -> Link:
        async def open_stream(node: Node, token: str) -> Stream:
            if node.transport:
                return await open_command(node, token)
            return await open_ssh(node, token, gate, prompts, lambda line: sink.say("warning", line))

        return NodeLink(node, subscriber, cursor, sink, open_stream=open_stream)

    return make
