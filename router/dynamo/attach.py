"""From the router's configuration to a follower of a Dynamo fleet."""

from secrets import randbits

from router.config import RouterConfig
from router.core import RouterCore
from router.dynamo.fleet import DynamoFleet
from router.dynamo.follower import DynamoFollower
from router.dynamo.incumbents import Incumbents
from router.dynamo.metrics import DynamoCollector
from router.dynamo.settings import DynamoSettings
from router.errors import ConfigError
from router.metrics import RouterMetrics
from router.outbox import Outbox
from router.shadow import Shadow


def dynamo_follower(
    config: RouterConfig,
    core: RouterCore,
    outbox: Outbox,
    metrics: RouterMetrics,
    shadow: Shadow | None,
    incarnation: int,
) -> DynamoFollower | None:
    """A follower of the Dynamo fleet that is configured, if one is. Raises ConfigError.

    `incarnation`: above that of any earlier process of this router.
    """
    settings = dynamo_settings(config)
    if settings is None:
        return None
    fleet = DynamoFleet(core, settings, incarnation, multiplier=randbits(64) | 1)
    incumbents = None if shadow is None else Incumbents(core, fleet, shadow, settings)
    name = f"router {config.name} at Dynamo"
    follower = DynamoFollower(core, outbox, settings, fleet, incumbents, name)
    DynamoCollector(follower, metrics)
    outbox.add_reteller(follower.retell)
    return follower


def dynamo_settings(config: RouterConfig) -> DynamoSettings | None:
    """The Dynamo fleet to follow, if there is one. Raises ConfigError."""
    namespace, component = config.dynamo_namespace, config.dynamo_component
    if not namespace and not component:
        return None
    if not namespace or not component:
        missing = "dynamo_component" if namespace else "dynamo_namespace"
        raise ConfigError(missing, "missing", "a namespace and a component, or neither")
    if not config.dynamo_block_size:
        reason = "missing; Dynamo's events do not say it"
        raise ConfigError("dynamo_block_size", reason, "the workers' kv_cache_block_size")
    nats_url = config.dynamo_nats_url or config.nats_url
    if not nats_url:
        raise ConfigError("dynamo_nats_url", "missing", "the NATS server of the Dynamo fleet")
    return DynamoSettings(
        nats_url=nats_url,
        namespace=namespace,
        component=component,
        model_name=config.dynamo_model_name,
        routing_group=config.dynamo_routing_group,
        block_size=config.dynamo_block_size,
        max_num_batched_tokens=config.dynamo_max_num_batched_tokens,
        total_kv_blocks=config.dynamo_total_kv_blocks,
        max_ranks=config.dynamo_max_ranks,
        silence_s=config.dynamo_silence_s,
        naming=config.naming,
    )
