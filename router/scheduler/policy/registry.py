"""All built-in policies, and the choice of the policy for a request."""

from collections.abc import Iterable, Mapping

from router.errors import ConfigError, InvalidFieldError
from router.protocol.requests import ConfigOverride, SelectRequest
from router.scheduler.ignored import by_policy, objectives
from router.scheduler.policy.cache_aware import CacheAware, LMetric
from router.scheduler.policy.dynamo import Dynamo10, Dynamo16
from router.scheduler.policy.predictive import Predictive
from router.scheduler.policy.simple import LeastLoaded, PowerOfTwo, RoundRobin, Uniform
from router.scheduler.selector import Selector
from router.scheduler.settings import NO_GROUPS


def builtin_policies() -> list[Selector]:
    """Return a new instance of each built-in policy."""
    return [
        Dynamo10(),
        Dynamo16(),
        RoundRobin(),
        Uniform(),
        LeastLoaded(),
        PowerOfTwo(),
        CacheAware(),
        LMetric(),
        Predictive(),
    ]


MOST_OVERRIDES = 256
"""Limit of overrides with known effects; at the limit, the cache is emptied."""


class Policies:
    """The selectors of one core, by name; the default, and those of routing groups."""

    __slots__ = ("_by_group", "_by_name", "_default", "_ignored")

    def __init__(
        self,
        selectors: Iterable[Selector],
        default: str,
        by_group: Mapping[str, str] = NO_GROUPS,
    ) -> None:
        """Index the selectors. Raises ConfigError if two share a name, or a name is unknown."""
        self._by_name: dict[str, Selector] = {}
        self._ignored: dict[tuple[str, ConfigOverride, bool], Mapping[str, str]] = {}
        for selector in selectors:
            if selector.name in self._by_name:
                raise ConfigError("policy", f"two are named {selector.name!r}", "one name each")
            self._by_name[selector.name] = selector
        self.assign(default, by_group)

    def assign(self, default: str, by_group: Mapping[str, str]) -> None:
        """Set the default and those of groups; each keeps its state. Raises ConfigError."""
        found = self.configured("policy", default)
        self._by_group = {
            group: self.configured("group_policies", name) for group, name in by_group.items()
        }
        self._default = found

    @property
    def names(self) -> list[str]:
        """The names of all policies, in alphabetical order."""
        return sorted(self._by_name)

    @property
    def available(self) -> list[Selector]:
        """All policies, in the order given."""
        return list(self._by_name.values())

    def ignored(self, name: str, override: ConfigOverride, *, is_booked: bool) -> Mapping[str, str]:
        """Return the fields of an override without effect under a policy; see `by_policy`.

        Cached: callers repeat their overrides.
        """
        key = (name, override, is_booked)
        found = self._ignored.get(key)
        if found is None:
            every = self._by_name.values()
            found = by_policy(override, self._by_name[name], every, is_booked=is_booked)
            if len(self._ignored) >= MOST_OVERRIDES:
                self._ignored.clear()
            self._ignored[key] = found
        return found

    def ignored_objectives(self, name: str, request: SelectRequest) -> Mapping[str, str]:
        """Return the objectives of a request without effect under a policy; see `objectives`."""
        return objectives(request, self._by_name[name], self._by_name.values())

    def find(self, routing_group: str, wanted: str | None) -> Selector:
        """Return the policy a request names, else its group's. Raises InvalidFieldError."""
        if wanted is None:
            return self._by_group.get(routing_group, self._default)
        selector = self._by_name.get(wanted)
        if selector is None:
            field, reason = "router_config_override.policy", f"{wanted!r} is not known"
            raise InvalidFieldError(field, reason, self._allowed, status=422)
        return selector

    def find_named(self, name: str) -> Selector:
        """Return the policy of a choice."""
        return self._by_name[name]

    def configured(self, key: str, name: str) -> Selector:
        """Return the policy that a setting names. Raises ConfigError."""
        selector = self._by_name.get(name)
        if selector is None:
            raise ConfigError(key, f"{name!r} is not known", self._allowed)
        return selector

    @property
    def _allowed(self) -> str:
        return ", ".join(self.names)


def parsed_groups(text: str) -> dict[str, str]:
    """Parse `group=policy,group=policy` into a mapping. Raises ConfigError."""
    groups: dict[str, str] = {}
    for part in filter(None, text.split(",")):
        group, equals, name = (word.strip() for word in part.rpartition("="))
        if not (group and equals and name):
            raise ConfigError("group_policies", f"{part!r}", "group=policy, separated by commas")
        if group in groups:
            raise ConfigError("group_policies", f"{group!r} is named twice", "one policy a group")
        groups[group] = name
    return groups
