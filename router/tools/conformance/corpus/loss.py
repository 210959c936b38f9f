"""Batches that do not arrive. Written by hand in vLLM 0.33's form."""

from typing import Any

from router.tools.conformance.events import prompt, publish, removed, stored, text
from router.tools.conformance.steps import Ask, CloseReplay, EngineSpec, Scenario, Step

GROUP = "lost batches"
REPLAYED = "a lost batch that a replay has"
A = text("a", 12)
NO_REPLAY = (EngineSpec(has_replay=False),)
OLD_REPLAY = (EngineSpec(replays_topic=False),)
LOST = "the lost batch cannot be known; a router can say that one was lost."


def scenario(name: str, *steps: Step, **fields: Any) -> Scenario:
    """Return a scenario of this group."""
    return Scenario(name, GROUP, steps, **fields)


def asked(blocks: int) -> Ask:
    """Ask about the one text."""
    return Ask(prompt(A), (blocks,))


LOST_STORE = (publish(stored(A, 0, 4)), publish(stored(A, 4, 8), arrives=False),
              publish(stored(A, 8)))  # fmt: skip
LOST_REMOVAL = (publish(stored(A)), publish(removed(A, 11), removed(A, 10), arrives=False),
                publish(stored(text("b", 1))))  # fmt: skip

SCENARIOS = (
    scenario("stored batch lost, replay", *LOST_STORE, asked(12), cause=REPLAYED),
    scenario("removal lost, replay", *LOST_REMOVAL, asked(10), cause=REPLAYED),
    scenario("stored batch lost, replay without topic", *LOST_STORE, asked(12),
             engines=OLD_REPLAY, note="This is vLLM's replay before #45177."),
    scenario("stored batch lost, no replay; the chain stored again",
             *LOST_STORE, publish(*[removed(A, i) for i in reversed(range(12))]),
             publish(stored(A)), asked(12), engines=NO_REPLAY),
    scenario("stored batch lost, no replay", *LOST_STORE, asked(12), engines=NO_REPLAY,
             unknowable=LOST),
    scenario("removal lost, no replay", *LOST_REMOVAL, asked(10), engines=NO_REPLAY,
             unknowable=LOST),
    scenario("replay socket gone, then a stored batch lost",
             publish(stored(A, 0, 4)), CloseReplay(), publish(stored(A, 4, 8), arrives=False),
             publish(stored(A, 8)), asked(12), unknowable=LOST),
)  # fmt: skip
