"""The order in which intents of one node are carried out, whatever is called off in between."""

from __future__ import annotations

import asyncio

from console.rollout import events as e
from console.rollout.effects import Outcome, Tell
from console.rollout.lanes import Lanes
from console.rollout.states import RolloutState, Rules
from tests.console.fake_host import eventually
from tests.console.rollout.fakes import FakeEffects

STATE = RolloutState(Rules(), ())
FIRST, SECOND = e.StartNode("a", 1, ("before_shift", "warm")), e.StartNode("a", 2, ("before_shift", "warm"))


class SlowToEnd(FakeEffects):
    """The first attempt's hook puts back what it was changing, and is over once ``is_back`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.held = {e.StartNode}
        self.is_back = asyncio.Event()

    async def carry_out(self, intent: e.Intent, state: RolloutState, tell: Tell) -> Outcome:
        try:
            return await super().carry_out(intent, state, tell)
        except asyncio.CancelledError:
            if intent == FIRST:
                await self.is_back.wait()
            raise


async def test_what_waits_for_an_attempt_and_is_called_off_lets_nothing_past_it() -> None:
    """A node is backed out only once the first attempt's hook is over, though the second one never began."""
    effects, over = SlowToEnd(), []
    lanes = Lanes(effects, lambda ident, intent, outcome: over.append(ident), lambda event, data: None)
    lanes.begin(1, FIRST, STATE)
    await eventually(lambda: effects.begun == [FIRST])
    rest = (e.StopNode("a", 1), SECOND, e.StopNode("a", 2), e.BackOutNode("a", 2))
    for ident, intent in enumerate(rest, 2):
        lanes.begin(ident, intent, STATE)
    await eventually(lambda: over == [3])
    assert effects.begun == [FIRST]
    effects.is_back.set()
    await eventually(lambda: not lanes.is_busy)

    assert effects.begun == [FIRST, rest[0], rest[2], rest[3]]
    assert over == [3, 1, 2, 4, 5]


async def test_the_end_of_an_older_attempt_waits_for_no_later_one_and_ends_none() -> None:
    """A node that was silent is asked once more beside its new attempt; what follows waits for the answer."""
    effects = FakeEffects()
    effects.held = {e.StartNode, e.StopNode}
    lanes = Lanes(effects, lambda ident, intent, outcome: None, lambda event, data: None)
    late, hook = e.StopNode("a", 1), e.RunHook("a", 2, "shift")
    for ident, intent in enumerate((SECOND, late, hook), 1):
        lanes.begin(ident, intent, STATE)
    await eventually(lambda: effects.begun == [SECOND, late])
    await effects.let_go(e.StartNode)
    await eventually(lambda: effects.done == [SECOND])
    assert effects.begun == [SECOND, late]
    await effects.let_go(e.StopNode)
    await eventually(lambda: not lanes.is_busy)

    assert effects.done == [SECOND, late, hook]
    assert effects.called_off == []
