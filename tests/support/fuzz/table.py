"""All parsers that are fuzzed, by name."""

from support.fuzz import (
    agent_targets,
    edge_targets,
    engine_targets,
    file_targets,
    router_targets,
)

PARTS = (engine_targets, edge_targets, router_targets, agent_targets, file_targets)
TARGETS = {each.name: each for part in PARTS for each in part.TARGETS}
