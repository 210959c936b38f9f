"""Engines that hold the same text; events of one must not change another. Written by hand."""

from typing import Any

from router.tools.conformance.corpus.lives import IDLE
from router.tools.conformance.events import hashes, prompt, publish, removed, stored, text
from router.tools.conformance.steps import Ask, EngineSpec, Restart, Scenario, Step

GROUP = "several engines"
SHARED = "several engines with one text"
A = text("a", 4)
TWO, THREE = (EngineSpec(),) * 2, (EngineSpec(),) * 3
OTHERS = hashes(A, "another engine")


def scenario(name: str, engines: tuple[EngineSpec, ...], *steps: Step, **fields: Any) -> Scenario:
    """Return a scenario of this group."""
    return Scenario(name, GROUP, steps, engines, **fields)


def asked(*blocks: int) -> Ask:
    """Ask about all engines."""
    return Ask(prompt(A), blocks)


SCENARIOS = (
    scenario("4 and 2 blocks; the first evicts its second", TWO,
             publish(stored(A)), publish(stored(A, 0, 2), engine=1), asked(4, 2),
             publish(removed(A, 1)), asked(1, 2), cause=SHARED),
    scenario("3, 1 and 2 blocks; the first evicts its second", THREE,
             publish(stored(A, 0, 3)), publish(stored(A, 0, 1), engine=1),
             publish(stored(A, 0, 2), engine=2), asked(3, 1, 2), publish(removed(A, 1)),
             asked(1, 1, 2), cause=SHARED),
    scenario("the same under other names; one evicts its own", TWO,
             publish(stored(A, 0, 2, names=OTHERS), engine=1), asked(0, 2), publish(stored(A)),
             asked(4, 2), publish(removed(A, 1)), asked(1, 2)),
    scenario("one restarts, the other keeps its blocks", TWO,
             publish(stored(A)), publish(stored(A, 0, 2), engine=1), asked(4, 2),
             Restart(), asked(0, 2), cause=IDLE),
)  # fmt: skip
