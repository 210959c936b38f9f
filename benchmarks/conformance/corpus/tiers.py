"""Blocks on host and disk."""

from ..events import cleared, placeholder, prompt, publish, removed, stored, text
from ..steps import Ask, Scenario, Step

GROUP = "tiers"
A = text("a", 10)


def scenario(name: str, *steps: Step, **fields: str) -> Scenario:
    return Scenario(name, GROUP, steps, **fields)


def asked(blocks: int) -> Ask:
    return Ask(prompt(A), (blocks,))


SCENARIOS = (
    scenario("offloaded by hash alone, then evicted from the device",
             publish(stored(A)), publish(placeholder(A, "CPU")),
             *[publish(removed(A, i)) for i in reversed(range(10))], asked(10)),
    scenario("evicted from the device, then offloaded by hash alone",
             publish(stored(A)), *[publish(removed(A, i)) for i in reversed(range(10))],
             publish(placeholder(A, "CPU")), asked(10)),
    scenario("offloaded with tokens, then evicted from the device",
             publish(stored(A)), publish(stored(A, medium="CPU")),
             *[publish(removed(A, i)) for i in reversed(range(10))], asked(10)),
    scenario("… and from the host as well",
             publish(stored(A)), publish(placeholder(A, "CPU")),
             *[publish(removed(A, i)) for i in reversed(range(10))],
             *[publish(removed(A, i, medium="CPU")) for i in reversed(range(10))], asked(0)),
    scenario("removed from the host, still on the device",
             publish(stored(A)), publish(placeholder(A, "CPU")),
             *[publish(removed(A, i, medium="CPU")) for i in reversed(range(10))], asked(10)),
    scenario("placeholder of a block nobody ever named", publish(placeholder(A, "CPU")), asked(0)),
    scenario("device prefix, the rest on disk",
             publish(stored(A)), publish(stored(A, medium="STORAGE")),
             *[publish(removed(A, i)) for i in reversed(range(4, 10))], asked(10)),
    scenario("device cleared, host kept",
             publish(stored(A)), publish(placeholder(A, "CPU")), publish(cleared()), asked(10),
             convention="the event names no tier: vLLM clears the device, SGLang all of them."),
)  # fmt: skip
