"""What HAProxy says is read as it is meant, or refused; halves of it are never taken for the whole."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from console.errors import HookFailed, HookRetry
from console.hooks.haproxy.protocol import (
    Server,
    State,
    Weight,
    check_changed,
    grown,
    parse_find,
    parse_look,
    parse_weight,
)

STATE = b"""1
# be_id be_name srv_id srv_name srv_op_state srv_admin_state srv_uweight srv_iweight srv_check_state srv_agent_state
3 b 1 gpu-1 2 8 40 100 6 0
3 b 2 gpu-10 2 0 1 1 0 0
"""
STAT = (
    b'# pxname,svname,qcur,scur,econ,eresp,status,hrsp_5xx,tracked,check_desc,\nb,gpu-1,1,2,3,4,DRAIN,5,,"a, ""b""",\n'
)
FIND = b"admin\n\n" + STATE + b"\n"
LOOK = b"Name: HAProxy\nPid: 42\nUptime_sec: 7\n\n" + STATE + b"\n" + STAT + b"\n"


def test_a_server_is_read_from_all_parts_of_an_answer() -> None:
    """Its state from the administrator's bits, its errors summed, a quoted comma no column."""
    assert parse_find(FIND, "b/gpu-1") == (3, 1)
    assert parse_look(LOOK, "b/gpu-1") == Server(42, State.DRAIN, 40, 100, "DRAIN", 2, 1, 12, True, False)


@pytest.mark.parametrize(
    ("admin_state", "state"),
    [(0, "ready"), (0x01, "maint"), (0x09, "maint"), (0x08, "drain"), (0x02, "ready"), (0x20, "ready")],
)
def test_only_what_an_administrator_forced_is_a_state(admin_state: int, state: str) -> None:
    """What is inherited from a tracked server or comes of a name that does not resolve was not set here."""
    look = LOOK.replace(b" 2 8 40 ", f" 2 {admin_state} 40 ".encode())

    assert parse_look(look, "b/gpu-1").state is State(state)


def test_no_beginning_of_an_answer_is_an_answer() -> None:
    """Wherever it is cut, it may be asked again."""
    for whole, parse in ((FIND, parse_find), (LOOK, parse_look)):
        for length in range(len(whole)):
            with pytest.raises(HookRetry):
                parse(whole[:length], "b/gpu-1")


@given(st.binary(max_size=200))
def test_garbage_raises_nothing_but_a_hooks_error(garbage: bytes) -> None:
    """Whatever listens there."""
    for answer in (garbage, b"admin\n\n1\n" + garbage + b"\n\n", LOOK.replace(b"40", garbage)):
        for parse in (parse_find, parse_look):
            try:
                parse(answer, "b/gpu-1")
            except HookFailed:
                pass


def test_a_field_that_is_no_number_or_missing_is_named() -> None:
    """Rather than taken for 0."""
    with pytest.raises(HookFailed, match="'x' for srv_uweight, which is no number"):
        parse_look(LOOK.replace(b" 40 ", b" x "), "b/gpu-1")
    with pytest.raises(HookFailed, match="nothing of Pid"):
        parse_look(LOOK.replace(b"Pid", b"Dip"), "b/gpu-1")


def test_only_an_empty_line_says_that_a_change_was_made() -> None:
    """Nothing at all may be a process that died before it did it."""
    check_changed(b"\n", "set")
    with pytest.raises(HookRetry, match="after 0 bytes"):
        check_changed(b"", "set")
    with pytest.raises(HookFailed, match=r"^HAProxy refuses `set x`: No such server\.$"):
        check_changed(b"No such \x1b[2Jserver.\n\n", "set x")


@pytest.mark.parametrize("text", ["", "0", "0%", "101%", "257", "-1", "10%%", "1.5", "٣", "1 0"])
def test_what_gives_no_traffic_or_is_no_number_is_no_weight(text: str) -> None:
    """A step of nothing would be none."""
    assert parse_weight(text) is None


def test_a_share_is_of_what_the_configuration_gives() -> None:
    """Rounded down, as HAProxy does, and never above its most."""
    assert parse_weight("10%") == Weight(10, True)
    assert [Weight(10, True).of(configured) for configured in (1, 99, 100, 256)] == [0, 9, 10, 25]
    assert Weight(40, False).of(100) == 40


def test_a_counter_that_was_cleared_has_grown_by_what_it_shows() -> None:
    """``clear counters all`` hides nothing that came after it."""
    assert (grown(7, 5), grown(2, 5)) == (2, 2)
