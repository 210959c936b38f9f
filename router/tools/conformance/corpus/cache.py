"""Blocks that come and go in one engine's cache. Written by hand in vLLM 0.33's form."""

from typing import Any

from router.tools.conformance.events import (
    cleared,
    each,
    hashes,
    prompt,
    publish,
    removed,
    stored,
    text,
)
from router.tools.conformance.steps import Ask, EngineSpec, Scenario, Step

GROUP = "one cache"
TAIL = "blocks stored and evicted at the tail"
MIDDLE = "a block in the middle evicted"
COPIES = "several copies of a block"
HOLE = "a hole filled, the blocks behind it kept"
CHILD_FIRST = "a child before its parent"
IMPOSSIBLE = "impossible events beside good ones"
CLEARED = "the device's cache cleared"
REANNOUNCED = "held blocks reported again (report_mode full)"
LIKE_COPIES = (
    "on the wire this is «stored twice, removed once»: only a setting can distinguish them."
)
A, B, C = text("a", 10), text("b", 3), text("c", 4)
LONG = text("l", 300)


def scenario(name: str, *steps: Step, **fields: Any) -> Scenario:
    """Return a scenario of this group."""
    return Scenario(name, GROUP, steps, **fields)


def asked(token_ids: tuple[int, ...], blocks: int) -> Ask:
    """Ask about the one engine."""
    return Ask(prompt(token_ids), (blocks,))


SCENARIOS = (
    scenario("stored, evicted from the tail, stored again",
             publish(stored(A)), publish(removed(A, 9), removed(A, 8)), asked(A, 8),
             publish(stored(A, 8)), asked(A, 10), cause=TAIL),
    scenario("300 blocks, one a batch", *each(LONG), asked(LONG, 300), cause=TAIL),
    scenario("stored again in the same batch as its removal",
             publish(stored(A)), publish(removed(A, 9), stored(A, 9), removed(A, 9)), asked(A, 9),
             cause=TAIL),
    scenario("stored twice, removed once",
             publish(stored(A)), publish(stored(A)),
             *[publish(removed(A, i)) for i in reversed(range(10))], asked(A, 10), cause=COPIES,
             note="vLLM keeps a block once per copy and reports each."),
    scenario("four equal requests, partly evicted",
             *[publish(stored(A)) for _ in range(4)],
             publish(*[removed(A, 9) for _ in range(4)], *[removed(A, 8) for _ in range(3)],
                     *[removed(A, 7) for _ in range(2)]),
             asked(A, 9), cause=COPIES),
    scenario("stored twice, removed twice",
             publish(stored(A)), publish(stored(A)),
             *[publish(removed(A, i), removed(A, i)) for i in reversed(range(10))], asked(A, 0),
             cause=COPIES),
    scenario("middle block evicted", publish(stored(A)), publish(removed(A, 5)), asked(A, 5),
             cause=MIDDLE),
    scenario("middle block evicted, all behind it stored again",
             publish(stored(A)), publish(*[removed(A, i) for i in range(5, 10)]),
             publish(stored(A, 5)), asked(A, 10), cause=MIDDLE),
    scenario("middle block evicted, then stored again",
             publish(stored(A)), publish(removed(A, 5)), publish(stored(A, 5, 6)), asked(A, 10),
             cause=HOLE, note="The blocks behind it stay in the engine's cache."),
    scenario("… and a block appended to the old tail",
             publish(stored(A, 0, 9)), publish(removed(A, 5)), publish(stored(A, 5, 6)),
             publish(stored(A, 9)), asked(A, 10), cause=HOLE),
    scenario("root block evicted, then stored again",
             publish(stored(A)), publish(removed(A, 0)), asked(A, 0), publish(stored(A, 0, 1)),
             asked(A, 10), cause=HOLE),
    scenario("child before its parent",
             publish(stored(A, 5)), publish(stored(A, 0, 5)), asked(A, 10), cause=CHILD_FIRST),
    scenario("child before its parent, in one batch",
             publish(stored(A, 5), stored(A, 0, 5)), asked(A, 10), cause=CHILD_FIRST),
    scenario("child of a parent that never comes", publish(stored(A, 5)), asked(A, 0)),
    scenario("a removal of blocks never stored",
             publish(stored(A)), publish(removed(C, 0, 1)), asked(A, 10)),
    scenario("one hash twice in one event",
             publish(stored(A)),
             publish(stored(B, names=[hashes(B)[0], hashes(B)[1], hashes(B)[0]])),
             publish(stored(C)), asked(A, 10), asked(C, 4), cause=IMPOSSIBLE,
             note="No engine sends this; events before and after it must still count."),
    scenario("a block that is its own parent",
             publish(stored(A)), publish(stored(C, 0, 1) | {"parent_block_hash": hashes(C)[0]}),
             publish(stored(B)), asked(A, 10), asked(B, 3), cause=IMPOSSIBLE),
    scenario("AllBlocksCleared, then one text again",
             publish(stored(A)), publish(stored(C)), publish(cleared()), asked(A, 0),
             publish(stored(C)), asked(C, 4), asked(A, 0), cause=CLEARED),
    scenario("reported again, not stored again, then removed",
             publish(stored(A)), publish(stored(A)),
             *[publish(removed(A, i)) for i in reversed(range(10))], asked(A, 0),
             engines=(EngineSpec(reannounces=True),), cause=REANNOUNCED, unknowable=LIKE_COPIES),
)  # fmt: skip
