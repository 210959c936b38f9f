"""Routers to compare: a policy by name, with settings, as cores are made of them."""

from collections.abc import Mapping
from random import Random

from msgspec import Struct

from router.config import DECISION_SETTINGS, RouterConfig
from router.core import RouterCore
from router.errors import ConfigError
from router.indexer.radix_tree import MULTIPLIER
from router.process.settings import checked
from router.recording.format import Header, Setting
from router.tools.recordings.cores import decision_settings, replayed_core
from router.tools.simulation.specs import Spec

RECORDED = "recorded"
"""Names the settings of a recording as they are."""


class NamedPolicy(Struct, frozen=True):
    """Settings, and what they are called in reports."""

    name: str
    settings: Mapping[str, Setting]

    def make_core(self, rng: Random) -> RouterCore:
        """A core that decides so, of a router with an id of its own."""
        seed = rng.getrandbits(53)
        header = Header(
            product_version="",
            recorded_at="",
            settings={**self.settings, "name": f"simulated-{seed}"},
            seed=seed,
            multiplier=MULTIPLIER,
        )
        return replayed_core(header, {})


def named_policy(spec: Spec, base: Mapping[str, Setting]) -> NamedPolicy:
    """A policy with the options given, all others as in `base`. Raises ConfigError."""
    for key in spec.values:
        if key not in DECISION_SETTINGS:
            raise ConfigError("policies", f"{key} in {spec.text!r}", ", ".join(DECISION_SETTINGS))
    named = {} if spec.name == RECORDED else {"policy": spec.name}
    given = checked(RouterConfig, {**named, **spec.values}, f"in {spec.text!r}")
    policy = NamedPolicy(spec.text, {**base, **given})
    policy.make_core(Random(0))  # refuses what does not exist, before anything runs
    return policy


def default_settings() -> dict[str, Setting]:
    """Those of a router that is told nothing."""
    return decision_settings(RouterConfig())
