"""Clients that mean harm, or nothing: a keeper answers the next one all the same and keeps nothing of theirs."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

import pytest

from remote_agent.keeper.client import KeeperAddress, ask, list_residents
from remote_agent.keeper.holdings import DESCRIPTORS_MAX
from remote_agent.keeper.serving import LINE_BYTES, WAITING_MAX
from tests.remote_agent.agentd.agents import eventually
from tests.remote_agent.keeper.keepers import at_rest, memory, open_in, put


def send_as_much_as_is_taken(link: socket.socket, data: bytes) -> None:
    try:
        link.sendall(data)
    except (BrokenPipeError, ConnectionResetError):
        pass  # the keeper has had enough


def garbage(link: socket.socket) -> None:
    send_as_much_as_is_taken(link, os.urandom(4096) + b"\n" + os.urandom(4096))


def long_line(link: socket.socket) -> None:
    send_as_much_as_is_taken(link, b"x" * (10 << 20))


def many_descriptors(link: socket.socket) -> None:
    with memory(b"x") as (descriptor,):
        for _ in range(2):
            try:
                socket.send_fds(link, [b"put much"], [descriptor] * 150)
            except (BrokenPipeError, ConnectionResetError):
                return


def few_descriptors_often(link: socket.socket) -> None:
    with memory(b"x") as (descriptor,):
        for _ in range(2 * DESCRIPTORS_MAX):
            try:
                socket.send_fds(link, [b"p"], [descriptor])
            except (BrokenPipeError, ConnectionResetError):
                return


def descriptors_with_another_word(link: socket.socket) -> None:
    with memory(b"x", b"y") as descriptors:
        socket.send_fds(link, [b"status\n"], descriptors)


def a_descriptor_of_the_keeper_itself(link: socket.socket) -> None:
    """A socket in flight inside itself, which only the kernel's collector could free."""
    socket.send_fds(link, [b"put me"], [link.fileno(), link.fileno()])


def half_a_line_and_away(link: socket.socket) -> None:
    with memory(b"x") as (descriptor,):
        socket.send_fds(link, [b"put hal"], [descriptor])


@pytest.mark.parametrize(
    "attack",
    [
        garbage,
        long_line,
        many_descriptors,
        few_descriptors_often,
        descriptors_with_another_word,
        a_descriptor_of_the_keeper_itself,
        half_a_line_and_away,
    ],
)
def test_nothing_changes_for_others(
    address: KeeperAddress, keeper: int, attack: Callable[[socket.socket], None]
) -> None:
    """The resident stays, the keeper answers, and no descriptor of the attacker's is left in it."""
    put(address, "llama@cpu", b"manifest", b"weights")
    before = at_rest(keeper)
    with address.connect() as link:
        attack(link)

    assert [one.name for one in list_residents(address)] == ["llama@cpu"]
    assert at_rest(keeper) == before


def test_who_says_nothing_is_let_go_and_holds_nobody_up(address: KeeperAddress, keeper: int) -> None:
    """More silent clients than are kept: the next one is answered, and all of them are dropped in time."""
    before = at_rest(keeper)
    silent = [address.connect() for _ in range(2 * WAITING_MAX)]
    try:
        assert ask(address, "status").count == 3
        assert len(open_in(keeper)) <= before + WAITING_MAX + 1
        assert at_rest(keeper) == before
    finally:
        for link in silent:
            link.close()


def test_a_lease_that_talks_is_over(address: KeeperAddress) -> None:
    """Its connection means one thing only."""
    put(address, "llama@cpu", b"manifest", b"weights")
    with address.connect() as link:
        link.sendall(b"get llama@cpu\n")
        data, descriptors, _, _ = socket.recv_fds(link, 256, 16)
        assert data.startswith(b"ok 2 ")
        link.sendall(b"status\n")

        assert link.recv(1) == b""
    for descriptor in descriptors:
        os.close(descriptor)
    eventually(lambda: not list_residents(address)[0].attached, "the lease ends")


def test_the_longest_name_fits_a_line(address: KeeperAddress) -> None:
    """The limit of a line is no limit of what is meant well."""
    name = "n" * 128
    put(address, name, b"manifest", b"weights")

    assert len(f"drop! {name}\n") < LINE_BYTES
    assert list_residents(address)[0].name == name
