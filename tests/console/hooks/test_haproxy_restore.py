"""``glowplug hook haproxy restore`` against Debian's HAProxy: what was before the rollout comes back."""

from __future__ import annotations

from console.hooks.haproxy.protocol import State
from tests.console.hooks.sites import Site


def test_what_was_before_the_first_attempt_comes_back(site: Site) -> None:
    """Weight 40 and ready, after a crash, a second attempt and a shift that failed; a second restore does nothing."""
    balancer = site.balancer()
    balancer.ask("set server models/gpu-1 weight 40")
    for _ in range(2):
        assert site.hook("drain", at=(balancer,))[0] == 0
    site.webs["gpu-1"].stop()
    assert site.hook("shift", "--timeout-s", "0.3", at=(balancer,))[0] == 1
    code, said = site.hook("restore")

    assert code == 0
    assert f"models/gpu-1 at {balancer.admin}: ready, weight 40, " in said
    assert (balancer.server("gpu-1").state, balancer.server("gpu-1").weight) == (State.READY, 40)
    code, said = site.hook("restore")
    assert (code, said) == (0, "nothing is remembered of gpu-1 in this rollout: all stays as it is\n")


def test_a_server_of_no_traffic_is_brought_back_to_none(site: Site) -> None:
    """One that an operator had in maintenance goes there again."""
    balancer = site.balancer()
    balancer.ask("set server models/gpu-1 state maint")
    assert site.hook("ready", at=(balancer,))[0] == 0

    assert site.hook("restore")[0] == 0
    assert balancer.server("gpu-1").state is State.MAINT


def test_a_rollout_that_never_ended_does_not_make_a_drained_server_the_rule(site: Site) -> None:
    """The next rollout's abort brings back what was before the first one; but not once traffic was given again."""
    balancer = site.balancer()
    site.hook("drain", at=(balancer,))
    site.rollout("r2")
    site.hook("drain", at=(balancer,))
    site.hook("restore")
    assert balancer.server("gpu-1").state is State.READY
    site.hook("shift", "--step-s", "0", at=(balancer,))
    balancer.ask("set server models/gpu-1 state drain")
    site.rollout("r3")
    site.hook("drain", at=(balancer,))

    assert site.hook("restore")[0] == 0
    assert balancer.server("gpu-1").state is State.DRAIN


def test_a_restore_that_reaches_one_of_two_is_not_over(site: Site) -> None:
    """What can be brought back is; exit 75, and the next try finishes it."""
    one, other = site.balancer(), site.balancer()
    site.hook("drain", at=(one, other))
    hidden = one.admin.rename(one.admin.with_suffix(".away"))
    code, said = site.hook("restore")

    assert code == 75
    assert f"models/gpu-1 at {one.admin}: No such file or directory\n" in said
    assert other.server("gpu-1").state is State.READY
    hidden.rename(one.admin)
    assert site.hook("restore")[0] == 0
    assert one.server("gpu-1").state is State.READY


def test_a_dry_restore_prints_what_is_different(site: Site) -> None:
    """And leaves it so."""
    balancer = site.balancer()
    site.hook("drain", at=(balancer,))
    code, said = site.hook("restore", "--dry-run")

    assert code == 0
    assert said.endswith(f"would say: models/gpu-1 at {balancer.admin}: set server models/gpu-1 state ready\n")
    assert balancer.server("gpu-1").state is State.DRAIN
