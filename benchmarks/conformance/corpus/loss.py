"""Batches that do not arrive."""

from ..events import prompt, publish, removed, stored, text
from ..steps import Ask, CloseReplay, EngineSpec, Scenario, Step

GROUP = "lost batches"
A = text("a", 12)
NO_REPLAY = (EngineSpec(has_replay=False),)
OLD_REPLAY = (EngineSpec(replays_topic=False),)
NOBODY_KNOWS = "Nobody can know what was lost; a router can say that something was."


def scenario(name: str, *steps: Step, **fields: object) -> Scenario:
    return Scenario(name, GROUP, steps, **fields)


def asked(blocks: int) -> Ask:
    return Ask(prompt(A), (blocks,))


LOST_STORE = (publish(stored(A, 0, 4)), publish(stored(A, 4, 8), arrives=False),
              publish(stored(A, 8)))  # fmt: skip
LOST_REMOVAL = (publish(stored(A)), publish(removed(A, 11), removed(A, 10), arrives=False),
                publish(stored(text("b", 1))))  # fmt: skip

SCENARIOS = (
    scenario("stored batch lost, replay", *LOST_STORE, asked(12)),
    scenario("stored batch lost, replay without topic", *LOST_STORE, asked(12),
             engines=OLD_REPLAY, note="As vLLM replayed before #45177."),
    scenario("removal lost, replay", *LOST_REMOVAL, asked(10)),
    scenario("stored batch lost, no replay", *LOST_STORE, asked(12), engines=NO_REPLAY,
             note=NOBODY_KNOWS),
    scenario("removal lost, no replay", *LOST_REMOVAL, asked(10), engines=NO_REPLAY,
             note=NOBODY_KNOWS),
    scenario("stored batch lost, no replay; the chain told again",
             *LOST_STORE, publish(*[removed(A, i) for i in reversed(range(12))]),
             publish(stored(A)), asked(12), engines=NO_REPLAY),
    scenario("replay socket gone, then a stored batch lost",
             publish(stored(A, 0, 4)), CloseReplay(), publish(stored(A, 4, 8), arrives=False),
             publish(stored(A, 8)), asked(12), note=NOBODY_KNOWS),
)  # fmt: skip
