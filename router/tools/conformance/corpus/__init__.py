"""All scenarios, in the order of the table."""

from router.tools.conformance.corpus import (
    cache,
    captures,
    identity,
    lives,
    loss,
    several,
    tiers,
    wire,
)
from router.tools.conformance.steps import Scenario

SCENARIOS: tuple[Scenario, ...] = (
    *wire.SCENARIOS,
    *cache.SCENARIOS,
    *identity.SCENARIOS,
    *tiers.SCENARIOS,
    *several.SCENARIOS,
    *loss.SCENARIOS,
    *lives.SCENARIOS,
    *captures.scenarios(),
)
