"""Blocks on host and disk. Written by hand in the forms of vLLM 0.33 and SGLang 0.5.23."""

from typing import Any

from router.tools.conformance.events import (
    cleared,
    hashes,
    placeholder,
    prompt,
    publish,
    removed,
    signed,
    stored,
    text,
)
from router.tools.conformance.steps import Ask, EngineSpec, Scenario, Step

GROUP = "tiers"
BY_HASH = "offloaded by hash alone"
WITH_TOKENS = "offloaded with tokens"
A = text("a", 10)
SIGNED = signed(hashes(A))
ON_BOTH = stored(A, names=SIGNED), stored(A, names=SIGNED, medium="CPU_PINNED")
"""SGLang's events of blocks on the device and on the host."""


def scenario(name: str, *steps: Step, **fields: Any) -> Scenario:
    """Return a scenario of this group."""
    return Scenario(name, GROUP, steps, **fields)


def asked(blocks: int) -> Ask:
    """Ask about the one text."""
    return Ask(prompt(A), (blocks,))


SCENARIOS = (
    scenario("offloaded by hash alone, then evicted from the device",
             publish(stored(A)), publish(placeholder(A, "CPU")),
             *[publish(removed(A, i)) for i in reversed(range(10))], asked(10), cause=BY_HASH),
    scenario("evicted from the device, then offloaded by hash alone",
             publish(stored(A)), *[publish(removed(A, i)) for i in reversed(range(10))],
             publish(placeholder(A, "CPU")), asked(10), cause=BY_HASH),
    scenario("… and removed from the host as well",
             publish(stored(A)), publish(placeholder(A, "CPU")),
             *[publish(removed(A, i)) for i in reversed(range(10))],
             *[publish(removed(A, i, medium="CPU")) for i in reversed(range(10))], asked(0),
             cause=BY_HASH),
    scenario("removed from the host, still on the device",
             publish(stored(A)), publish(placeholder(A, "CPU")),
             *[publish(removed(A, i, medium="CPU")) for i in reversed(range(10))], asked(10),
             cause=BY_HASH),
    scenario("offloaded with tokens, then evicted from the device",
             publish(stored(A)), publish(stored(A, medium="CPU")),
             *[publish(removed(A, i)) for i in reversed(range(10))], asked(10), cause=WITH_TOKENS),
    scenario("device prefix, the rest on disk",
             publish(stored(A)), publish(stored(A, medium="STORAGE")),
             *[publish(removed(A, i)) for i in reversed(range(4, 10))], asked(10),
             cause=WITH_TOKENS),
    scenario("SGLang's CPU_PINNED, then evicted from the device",
             *map(publish, ON_BOTH),
             *[publish(removed(A, i, names=SIGNED)) for i in reversed(range(10))], asked(10),
             engines=(EngineSpec(kind="sglang"),), cause=WITH_TOKENS),
    scenario("placeholder of a block that was never stored", publish(placeholder(A, "CPU")),
             asked(0)),
    scenario("SGLang clears: the host as well",
             *map(publish, ON_BOTH),
             publish(cleared()), asked(0), engines=(EngineSpec(kind="sglang"),),
             note="SGLang's cache resets all its tiers. kv-router is configured with the kind of "
             "the engine."),
    scenario("vLLM clears: the device alone",
             publish(stored(A)), publish(placeholder(A, "CPU")), publish(cleared()), asked(10),
             convention="the event names no tier: vLLM clears the device, SGLang all of them."),
)  # fmt: skip
