"""Engines that hold the same text; what one does must not change another."""

from ..events import hashes, prompt, publish, removed, stored, text
from ..steps import Ask, EngineSpec, Restart, Scenario, Step

GROUP = "several engines"
A = text("a", 4)
TWO, THREE = (EngineSpec(),) * 2, (EngineSpec(),) * 3
OTHERS = hashes(A, "another engine")


def scenario(name: str, engines: tuple[EngineSpec, ...], *steps: Step, **fields: str) -> Scenario:
    return Scenario(name, GROUP, steps, engines, **fields)


def asked(*blocks: int) -> Ask:
    return Ask(prompt(A), blocks)


SCENARIOS = (
    scenario("4 and 2 blocks; the first evicts its second", TWO,
             publish(stored(A)), publish(stored(A, 0, 2), engine=1), asked(4, 2),
             publish(removed(A, 1)), asked(1, 2)),
    scenario("3, 1 and 2 blocks; the first evicts its second", THREE,
             publish(stored(A, 0, 3)), publish(stored(A, 0, 1), engine=1),
             publish(stored(A, 0, 2), engine=2), asked(3, 1, 2), publish(removed(A, 1)),
             asked(1, 1, 2)),
    scenario("the same under other names; one evicts its own", TWO,
             publish(stored(A, 0, 2, names=OTHERS), engine=1), asked(0, 2), publish(stored(A)),
             asked(4, 2), publish(removed(A, 1)), asked(1, 2)),
    scenario("one restarts, the other keeps its blocks", TWO,
             publish(stored(A)), publish(stored(A, 0, 2), engine=1), asked(4, 2),
             Restart(), asked(0, 2)),
)  # fmt: skip
