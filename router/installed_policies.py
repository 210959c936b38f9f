"""Policies that other packages install: the entry points of the group `kv_router.policies`."""

from importlib.metadata import EntryPoint, entry_points

from router.errors import ConfigError
from router.scheduler.custom import CustomPolicy, checked_policy
from router.scheduler.policies import builtin_policies
from router.scheduler.selector import Selector

GROUP = "kv_router.policies"


def installed_policies() -> list[CustomPolicy]:
    """One of each installed policy, in order of their entry points' names. Raises ConfigError."""
    found = sorted(entry_points(group=GROUP), key=lambda each: (each.name, each.value))
    return [_made(each) for each in found]


def every_policy() -> list[Selector]:
    """One of each policy there is. Raises ConfigError."""
    return [*builtin_policies(), *installed_policies()]


def _made(each: EntryPoint) -> CustomPolicy:
    """An entry point names a class, or a function without arguments, that makes the policy."""
    origin = f"entry point {each.name} ({each.value}) of {GROUP}"
    try:
        made = each.load()()
    except Exception as error:
        reason = f"cannot be made: {type(error).__name__}: {error}"
        raise ConfigError(origin, reason, "a subclass of Policy made without arguments") from error
    return checked_policy(origin, made)
