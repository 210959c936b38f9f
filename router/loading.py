"""From the command line and the environment to the router's configuration."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

from msgspec import structs

from router.config import RouterConfig
from router.config_rules import check_router
from router.dynamo_names import ALIASES, PREFIX, REFUSED
from router.process.aliases import check_variables
from router.process.settings import ROUTER_PREFIX, Loaded, load_with_sources
from router.queue_config import policy_file_text

T = TypeVar("T", bound=RouterConfig)


def load_router(
    config_type: type[T], arguments: Sequence[str], environment: Mapping[str, str]
) -> Loaded[T]:
    """The configuration of a router, whose settings have the names that Dynamo gives them, too.

    Raises ConfigError, for settings that contradict each other as well.
    """
    check_variables(environment, PREFIX, ALIASES, REFUSED)
    loaded = load_with_sources(config_type, arguments, environment, ROUTER_PREFIX, aliases=ALIASES)
    check_router(loaded.config, loaded.sources)
    return structs.replace(loaded, config=_completed(loaded.config))


def load_router_config(arguments: Sequence[str], environment: Mapping[str, str]) -> RouterConfig:
    """The same, of a router that serves. Shows it and exits on `--show-config`."""
    return load_router(RouterConfig, arguments, environment).shown()


def _completed(config: T) -> T:
    """With the text of its policy file, and no more waiting than connections allow."""
    path, most = config.router_policy_config, config.max_connections // 2
    return structs.replace(
        config,
        router_policy_config=policy_file_text(path) if path else "",
        max_waiting_requests=max(1, min(config.max_waiting_requests, most)),
    )
