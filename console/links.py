"""How links to nodes are made outside of tests: over SSH, or over a node's own transport."""

from __future__ import annotations

from collections.abc import Callable

from console.config_nodes import Node
from console.prompts import PromptQueue
from console.session import Link, Session
from console.transports.base import Stream
from console.transports.gate import Gate

LinkFactory = Callable[[Node, str, Callable[[str], int], Session], Link]
"""``(node, subscriber, cursor, sink)``."""


def real_links(gate: Gate, prompts: PromptQueue | None = None) -> LinkFactory:
    """Return what makes links over SSH, or over a node's own transport; without ``prompts`` nobody is asked."""
    from console.link import NodeLink
    from console.transports.command import open_command
    from console.transports.ssh import open_ssh

    def make(node: Node, subscriber: str, cursor: Callable[[str], int], sink: Session) -> Link:
        async def open_stream(node: Node, token: str) -> Stream:
            if node.transport:
                return await open_command(node, token)
            return await open_ssh(node, token, gate, prompts, lambda line: sink.say("warning", line))

        reconsider = prompts.reconsider if prompts is not None else lambda: None
        return NodeLink(node, subscriber, cursor, sink, open_stream=open_stream, reconsider=reconsider)

    return make
