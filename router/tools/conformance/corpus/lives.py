"""Engines and routers that die and return. A restarted engine's numbers begin at 0 again."""

from collections.abc import Sequence
from typing import Any

from router.tools.conformance.events import each, prompt, publish, stored, text
from router.tools.conformance.steps import (
    Ask,
    EngineSpec,
    Publish,
    Restart,
    RestartRouter,
    Scenario,
    Step,
)

GROUP = "restarts"
ENGINE = "an engine restarts and publishes"
UNSEEN = "an engine restarts, its first batches unseen"
IDLE = "an engine restarts and stays idle"
KILLED = "the router is killed"
NO_REPLAY = (EngineSpec(has_replay=False),)
CHAIN = 20
"""Blocks of a text; each is a batch."""
OLD = [text(letter, CHAIN) for letter in "abcdefghij"]
NEW = [text(letter, CHAIN) for letter in "klmnopqrstuvw"]
MORE = text("a", CHAIN + 1)
SILENT = "without a replay or a live event the answer cannot be known."


def scenario(name: str, *steps: Step, **fields: Any) -> Scenario:
    """Return a scenario of this group."""
    return Scenario(name, GROUP, steps, **fields)


def batches(texts: Sequence[tuple[int, ...]], count: int, unseen: int = 0) -> list[Publish]:
    """Return `count` blocks, one a batch; the first `unseen` precede the routers' reconnection."""
    steps = [step for token_ids in texts for step in each(token_ids)][:count]
    return [publish(*step.events, arrives=i >= unseen) for i, step in enumerate(steps)]


def asked(texts: Sequence[tuple[int, ...]], blocks: int) -> list[Ask]:
    """Ask about each text, of which the first `blocks` blocks are there."""
    counts = [min(max(blocks - CHAIN * i, 0), CHAIN) for i in range(len(texts))]
    return [Ask(prompt(each), (count,)) for each, count in zip(texts, counts, strict=True)]


def restarted(old: int, new: int, unseen: int = 0) -> tuple[Step, ...]:
    """Restart an engine that has published `old` batches; it then publishes `new`."""
    before, after = OLD[: -(-old // CHAIN)], NEW[: -(-new // CHAIN)]
    return (
        *batches(OLD, old), *asked(before, old), Restart(), *batches(NEW, new, unseen),
        *asked(before, 0), *asked(after, new),
    )  # fmt: skip


SCENARIOS = (
    scenario("engine: 200 batches, restart, 199", *restarted(200, 199), cause=ENGINE),
    scenario("engine: 200, restart, 200", *restarted(200, 200), cause=ENGINE),
    scenario("engine: 200, restart, 260", *restarted(200, 260), cause=ENGINE),
    scenario("engine: 200, restart, 199, no replay", *restarted(200, 199), engines=NO_REPLAY,
             cause=ENGINE),
    scenario("engine: two restarts, the same text each time",
             *batches(OLD, 20), Restart(), *batches(OLD, 10), Restart(), *batches(OLD, 5),
             *asked(OLD[:1], 5), cause=ENGINE),
    scenario("engine: 20, restart, 40 of which 20 before we reconnect", *restarted(20, 40, 20),
             cause=UNSEEN),
    scenario("engine: 20, restart, 21 of which 20 before we reconnect", *restarted(20, 21, 20),
             cause=UNSEEN, note="The next number is the expected one; only its content is not."),
    scenario("engine: 20, restart, 40 of which 20 before we reconnect, no replay",
             *restarted(20, 40, 20), engines=NO_REPLAY, unknowable=SILENT),
    scenario("engine: 20, restart, idle",
             *batches(OLD, 20), *asked(OLD[:1], 20), Restart(), *asked(OLD[:1], 0), cause=IDLE),
    scenario("engine: 20, restart, idle, no replay",
             *batches(OLD, 20), *asked(OLD[:1], 20), Restart(), *asked(OLD[:1], 0),
             engines=NO_REPLAY, cause=IDLE),
    scenario("router: kill −9, engine idle, replay",
             *batches(OLD, 20), *asked(OLD[:1], 20), RestartRouter(), *asked(OLD[:1], 20),
             cause=KILLED),
    scenario("router: kill −9, 10 batches meanwhile, then idle, replay",
             *batches(OLD, 10), asked(OLD[:1], 10)[0],
             *[publish(*step.events, arrives=False) for step in batches(OLD, 20)[10:]],
             RestartRouter(), *asked(OLD[:1], 20), cause=KILLED),
    scenario("router: kill −9, then one batch more, replay",
             *batches(OLD, 20), RestartRouter(), publish(stored(MORE, 20)),
             Ask(prompt(MORE), (21,)), cause=KILLED),
    scenario("router: kill −9, engine idle, no replay",
             *batches(OLD, 20), *asked(OLD[:1], 20), RestartRouter(), *asked(OLD[:1], 20),
             engines=NO_REPLAY, unknowable=SILENT),
)  # fmt: skip
