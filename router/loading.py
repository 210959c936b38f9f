"""From the command line and the environment to the router's configuration."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

from router.config import RouterConfig
from router.config_rules import check_rules
from router.dynamo_names import ALIASES, check_variables
from router.process.settings import ROUTER_PREFIX, Loaded, load_with_sources

T = TypeVar("T", bound=RouterConfig)


def load_router(
    config_type: type[T], arguments: Sequence[str], environment: Mapping[str, str]
) -> Loaded[T]:
    """The configuration of a router, whose settings have the names that Dynamo gives them, too.

    Raises ConfigError, for settings that contradict each other as well.
    """
    check_variables(environment)
    loaded = load_with_sources(config_type, arguments, environment, ROUTER_PREFIX, aliases=ALIASES)
    check_rules(loaded.config, loaded.sources)
    return loaded


def load_router_config(arguments: Sequence[str], environment: Mapping[str, str]) -> RouterConfig:
    """The same, of a router that serves. Shows it and exits on `--show-config`."""
    return load_router(RouterConfig, arguments, environment).shown()
