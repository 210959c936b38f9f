"""The core of a router as it ships: the one way to build it from settings.

The service, recordings, `kv-router simulate` and the benchmarks all build their cores here, so that
a comparison is of the router that users run, defaults included.
"""

import sys
from collections.abc import Iterable
from functools import lru_cache
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from random import Random

from msgspec.structs import replace

from router.config.router import RouterConfig
from router.core.core import RouterCore
from router.errors import ConfigError
from router.indexer.factory import make_indexer
from router.indexer.radix_tree.radix_tree import MULTIPLIER
from router.scheduler.policy.custom import CustomPolicy, checked_policy
from router.scheduler.policy.registry import builtin_policies
from router.scheduler.selector import Selector

GROUP = "kv_router.policies"
"""The entry points of installed policies."""


def make_core(
    config: RouterConfig,
    rng: Random,
    *,
    selectors: Iterable[Selector] | None = None,
    multiplier: int = MULTIPLIER,
) -> RouterCore:
    """Return an empty core with these settings. Raises ConfigError.

    `selectors`: the available policies; None: those that come with the router, and those installed.
    `multiplier`: that of the radix trees, which a recording contains.
    """
    index = replace(config.index_settings, multiplier=multiplier)
    available = every_policy() if selectors is None else selectors
    return RouterCore(config.core, lambda: make_indexer(index), rng, available)


def every_policy() -> list[Selector]:
    """Return one of each available policy. Raises ConfigError."""
    return [*builtin_policies(), *installed_policies()]


def installed_policies() -> list[CustomPolicy]:
    """Return one of each installed policy, by entry point name. Raises ConfigError."""
    found = sorted(_entry_points(tuple(sys.path)), key=lambda each: (each.name, each.value))
    return [_made(each) for each in found]


@lru_cache(maxsize=1)
def _entry_points(_path: tuple[str, ...]) -> EntryPoints:
    """Return the entry points of packages on a path. Reading them all takes 15 ms, once a run."""
    return entry_points(group=GROUP)


def _made(each: EntryPoint) -> CustomPolicy:
    """Make the policy of an entry point: a class, or a function without arguments."""
    origin = f"entry point {each.name} ({each.value}) of {GROUP}"
    try:
        made = each.load()()
    except Exception as error:
        reason = f"cannot be made: {type(error).__name__}: {error}"
        raise ConfigError(origin, reason, "a subclass of Policy made without arguments") from error
    return checked_policy(origin, made)
