"""All scenarios, in the order of the table."""

from ..steps import Scenario
from . import cache, identity, lives, loss, several, tiers, vectors, wire

SCENARIOS: tuple[Scenario, ...] = (
    *vectors.scenarios(),
    *wire.SCENARIOS,
    *cache.SCENARIOS,
    *identity.SCENARIOS,
    *tiers.SCENARIOS,
    *several.SCENARIOS,
    *loss.SCENARIOS,
    *lives.SCENARIOS,
)
