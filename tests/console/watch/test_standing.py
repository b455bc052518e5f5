"""How warm a recipe is on a node, and why it is not any more."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from console.state import LinkState, LinkStatus, NodeState
from console.watch.causes import PHRASES, why_fell
from console.watch.standing import Seen, Wanted, see
from remote_agent.protocol.messages import Gpu, ModelSource, Probe, Recipe, Resident, ResidentChanged, Tier
from tests.console.happenings import hello

AGENT = Path(__file__).parents[3] / "remote_agent"
MODEL = ModelSource("/models/llama")
LLAMA = Recipe("llama", MODEL)
A, B = "GPU-aaaaaaaa", "GPU-bbbbbbbb"
GPUS = (Gpu(B, 1, "H200"), Gpu(A, 0, "H200"))


def warm(
    device: str, tier: Tier, recipe: str = "llama", model: str = MODEL.path, name: str | None = "kept"
) -> Resident:
    return Resident(f"run-{recipe}", recipe, model, device, tier, 1, None, "ada", 1, name=name)


def node(*residents: Resident, gpus: tuple[Gpu, ...] = GPUS) -> NodeState:
    probe = Probe("host", "6.1", 8, 100, 50, "nvml", gpus=gpus)
    link = LinkState(LinkStatus.CONNECTED)
    return NodeState("n1", link=link, hello=hello(), probe=probe, residents=residents)


@pytest.mark.parametrize(
    ("devices", "residents", "tier"),
    [
        (("auto",), (), Tier.COLD),
        (("auto",), (warm(A, Tier.STANDBY),), Tier.STANDBY),
        (("auto",), (warm(B, Tier.STANDBY),), Tier.COLD),
        (("auto",), (warm(A, Tier.RESIDENT), warm(A, Tier.STANDBY)), Tier.STANDBY),
        (("all",), (warm(A, Tier.STANDBY),), Tier.COLD),
        (("all",), (warm(A, Tier.STANDBY), warm(B, Tier.RESIDENT)), Tier.RESIDENT),
        (("cuda:1",), (warm(B, Tier.RESIDENT),), Tier.RESIDENT),
        (("cuda:1", A), (warm(B, Tier.RESIDENT),), Tier.COLD),
        (("cuda:7",), (warm(A, Tier.STANDBY), warm(B, Tier.STANDBY)), Tier.COLD),
        (("auto",), (warm(A, Tier.ARMED),), Tier.COLD),
        (("auto",), (warm(A, Tier.PARKED),), Tier.PARKED),
        (("auto",), (warm(A, Tier.RESIDENT, recipe="other"),), Tier.RESIDENT),
        (("auto",), (warm(A, Tier.STANDBY, recipe="other"),), Tier.RESIDENT),
        (("auto",), (warm(A, Tier.STANDBY, recipe="other", name=None),), Tier.COLD),
        (("auto",), (warm(A, Tier.STANDBY, model="/models/bert"),), Tier.COLD),
    ],
)
def test_a_recipe_is_as_warm_as_on_its_coldest_device(
    devices: tuple[str, ...], residents: tuple[Resident, ...], tier: Tier
) -> None:
    """Weights of the same files count whoever left them, another recipe's process does not, an armed one is cold."""
    seen = see(node(*residents), Wanted(replace(LLAMA, devices=devices), Tier.RESIDENT))

    assert (seen.is_known, seen.tier) == (True, tier)


def test_without_a_gpu_or_before_a_probe_any_device_is_meant() -> None:
    """The warmest counts."""
    residents = (warm("cpu", Tier.RESIDENT), warm("cpu", Tier.STANDBY))
    wanted = Wanted(LLAMA, Tier.STANDBY)
    unprobed = replace(node(*residents), probe=None)

    assert see(node(*residents, gpus=()), wanted).tier is Tier.STANDBY
    assert see(unprobed, wanted).tier is Tier.STANDBY
    files = Wanted(replace(LLAMA, target_tier="cached"), Tier.CACHED)
    assert see(node(warm("cpu", Tier.CACHED)), files).tier is Tier.CACHED


def test_what_a_link_says_is_no_tier() -> None:
    """Lost or silent is unreachable with its reason, connecting is neither; before an answer nothing is known."""
    wanted = Wanted(LLAMA, Tier.STANDBY)
    lost = LinkState(LinkStatus.DISCONNECTED, reason="connection refused")
    state = node(warm(A, Tier.STANDBY))

    assert see(NodeState("n1"), wanted) == Seen()
    assert see(NodeState("n1", link=lost), wanted).unreachable == "connection refused"
    assert see(replace(state, link=LinkState(LinkStatus.SILENT)), wanted).unreachable == "the link is silent"
    assert see(replace(state, link=lost), wanted).is_known is False
    assert see(replace(state, link=LinkState(LinkStatus.CONNECTING)), wanted).unreachable is None


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        ("released by request", "released"),
        ("run 1234 needed its room", "evicted"),
        ("its time to live of 60 s is over", "expired"),
        ("lost: Xid 79 (GPU has fallen off the bus) on GPU-1: reload", "gpu_error"),
        ("lost: 1 uncorrectable ECC error on GPU-1: reload", "gpu_error"),
        ("the agent that held it has ended", "agent_restarted"),
        ("the host was booted since", "host_rebooted"),
        ("its keeper, process 5, has ended", "keeper_ended"),
        ("its worker was killed by signal 9", "process_ended"),
        ("taken over by run 9", "gone"),
    ],
)
def test_the_cause_of_a_fall_is_what_the_agent_says(said: str, cause: str) -> None:
    """The newest word on what was held; nothing about others."""
    before = see(node(warm(A, Tier.RESIDENT)), Wanted(LLAMA, Tier.RESIDENT))
    mine = ResidentChanged(warm(A, Tier.RESIDENT), "gone", said)
    other = ResidentChanged(warm(B, Tier.RESIDENT), "gone", "nonsense")
    after = replace(before, tier=Tier.COLD, held=frozenset(), gone=(mine, other))

    assert why_fell(before, after) == (cause, said)


def test_a_cause_is_known_without_a_word_of_the_agent() -> None:
    """A boot beats what was said, another agent has it no more, and one that was parked is there still."""
    before = see(node(warm(A, Tier.STANDBY)), Wanted(LLAMA, Tier.STANDBY))
    after = replace(before, tier=Tier.COLD, held=frozenset())

    assert why_fell(before, replace(after, boot_id="boot-2"))[0] == "host_rebooted"
    assert why_fell(before, replace(after, agent_pid=8))[0] == "agent_restarted"
    assert why_fell(before, replace(before, tier=Tier.PARKED)) == ("moved", "it is parked now")
    assert why_fell(before, after) == ("gone", "it is not there any more, and nothing told why")


def test_each_phrase_is_one_that_agents_say() -> None:
    """Whoever words a reason anew there finds that a cause is read from it."""
    sources = "\n".join(path.read_text() for path in AGENT.rglob("*.py"))

    assert [phrase for phrase, _ in PHRASES if phrase not in sources] == []
