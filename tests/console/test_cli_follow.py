"""What a verb tells of a run on its way, and how a standby is named."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from console.cli.follow import Following
from console.cli.park import choose_standby
from console.errors import UsageError
from remote_agent.protocol.messages import Resident, RunState, Tier
from tests.console.fake_host import eventually
from tests.console.fleet_world import RECIPES, World


def standby(uid: str, tier: Tier = Tier.STANDBY, recipe: str = "llama") -> Resident:
    return Resident(uid, recipe, f"/models/{recipe}", "GPU-1", tier, 1000, 7, "ada", 1)


@pytest.mark.parametrize(
    ("which", "found"),
    [(None, None), ("llama", "11112222"), ("/models/phi", "33334444"), ("3333", "33334444"), ("bert", "55556666")],
)
def test_a_standby_is_named_by_recipe_model_or_run(which: str | None, found: str | None) -> None:
    """Where it is not clear what is meant, what there is is named; what is no standby is the node's to refuse."""
    there = [standby("11112222"), standby("33334444", Tier.PARKED, "phi"), standby("55556666", Tier.RESIDENT, "bert")]
    if found is None:
        with pytest.raises(UsageError, match=r"say which of .* 11112222 \(llama standby\), 33334444 \(phi parked\)"):
            choose_standby(there, which, "here")
    else:
        assert choose_standby(there, which, "here") == found


@pytest.mark.parametrize(("which", "words"), [("gpt", "'gpt' is none of"), ("1111", "'1111' is several of")])
def test_a_name_that_fits_none_or_several_is_refused(which: str, words: str) -> None:
    """With the candidates; the only standby is meant where nothing is named."""
    there = [standby("11112222"), standby("11113333")]
    with pytest.raises(UsageError, match=f"{words} what is on here: 11112222 "):
        choose_standby(there, which, "here")

    assert choose_standby(there[:1], None, "here") == "11112222"


async def test_progress_is_told_once_and_what_waits_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With one place the second node waits and is seen waiting; a failed run decides over a node out of reach."""
    world = World(tmp_path)
    world.hosts["n3"].is_reachable = False
    following = Following()
    async with world.fleet(parallel=1) as fleet:
        warming = asyncio.ensure_future(following.warm(fleet, ["n1", "n2", "n3"], RECIPES["llama"], wait=True))
        await eventually(lambda: world.hosts["n1"].runs and following.outcomes["n3"].error)
        said: list[str] = []
        await eventually(lambda: said.append(capsys.readouterr().err) or "waits for a place" in "".join(said))
        (first,) = world.hosts["n1"].runs
        assert [one.node for one in following.going] == ["n1"]
        world.hosts["n1"].finish(first, RunState.FAILED)
        await eventually(lambda: world.hosts["n2"].runs)
        (second,) = world.hosts["n2"].runs
        world.hosts["n2"].finish(second)
        await warming

    told = ("".join(said) + capsys.readouterr().err).splitlines()
    assert [line.split()[0] for line in told if "weights done" in line] == ["n1", "n2"]
    assert len([line for line in told if "waits for a place" in line]) == 1
    assert (following.exit_code, following.going) == (1, [])
    assert [run["status"] for run in following.documents()] == ["failed", "ready"]
    assert [error["node"] for error in following.errors()] == ["n3"]


async def test_a_refusal_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the verb's own word; that of a run that waited for a place is the run's end."""
    world = World(tmp_path)
    world.hosts["n1"].is_refusing = world.hosts["n3"].is_refusing = True
    async with world.fleet(parallel=1) as fleet:
        armed = Following()
        await armed.warm(fleet, ["n1"], RECIPES["llama"], arm=True)
        assert capsys.readouterr().err.splitlines() == ["n1             not armed: /models/llama: no such directory"]
        warming = asyncio.ensure_future(Following().warm(fleet, ["n2", "n3"], RECIPES["llama"]))
        await eventually(lambda: world.hosts["n2"].runs)
        (uid,) = world.hosts["n2"].runs
        world.hosts["n2"].finish(uid)
        await warming

    assert capsys.readouterr().err.count("/models/llama: no such directory") == 1
    assert armed.exit_code == 1


async def test_a_lost_link_is_told_with_its_reason_while_the_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Waiting in silence looks like a hang; each loss and each return is said once."""
    world = World(tmp_path)
    following = Following()
    said: list[str] = []

    def told(words: str) -> int:
        said.append(capsys.readouterr().err)
        return "".join(said).count(words)

    async with world.fleet() as fleet:
        warming = asyncio.ensure_future(following.warm(fleet, ["n1"], RECIPES["llama"], wait=True))
        await eventually(lambda: world.hosts["n1"].runs)
        (uid,) = world.hosts["n1"].runs
        world.hosts["n1"].begin(uid)
        world.links["n1"].lose("the cable was cut")
        await eventually(lambda: told("the cable was cut; the run goes on"))
        assert not warming.done()
        world.links["n1"].connect()
        await eventually(lambda: told("linked again"))
        world.links["n1"].lose("once more")
        await eventually(lambda: told("once more"))
        world.hosts["n1"].finish(uid)
        world.links["n1"].connect()
        await warming

    assert (told("the cable was cut"), told("disconnected since"), following.exit_code) == (1, 2, 0)
