"""Names that leases are held by, and what they tell of their processes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from console.leases import holder_name, may_live


def test_a_process_of_this_machine_that_is_gone_holds_nothing_any_more() -> None:
    """One that runs may, and so may this one."""
    host = holder_name().rpartition(":")[0].rpartition(":")[0]
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert may_live(f"{host}:{process.pid}:ab12")
    process.communicate()

    assert not may_live(f"{host}:{process.pid}:ab12")
    assert may_live(holder_name())


@pytest.mark.parametrize("name", ["elsewhere:1:ab12", "one", "", "::", "desk:x:ab12"])
def test_of_any_other_nothing_is_known(name: str) -> None:
    """Another machine's processes can't be seen from here."""
    assert may_live(name)
