"""Construction of the follower of a Dynamo fleet from the router's configuration."""

from secrets import randbits

from msgspec.structs import asdict

from router.config.discovery import DynamoConfig
from router.core.core import RouterCore
from router.core.views.shadow import Shadow
from router.discovery.dynamo.fleet.fleet import DynamoFleet
from router.discovery.dynamo.fleet.incumbents import Incumbents
from router.discovery.dynamo.fleet.settings import DynamoSettings
from router.discovery.dynamo.follower import DynamoFollower
from router.errors import ConfigError
from router.ingest.effect_runner import EffectRunner
from router.observability.metrics import RouterMetrics
from router.runtime.process.metrics import Rows, counter, expose, gauge
from router.sequence.hashing.keyed_hashes import HashKeying

_METRICS: Rows = {
    "connected": gauge("1 while subscribed at Dynamo's NATS", "is_connected"),
    "workers": gauge("Known workers of the Dynamo fleet", lambda follower: len(follower.fleet)),
    "messages": counter("Messages received, by outcome", "heard", "topic", "outcome"),
    "rank": counter(
        "Events and blocks, by outcome", lambda f: asdict(f.fleet.rank_counts()), "what"
    ),
    "fleet": counter("Loads and ranks, by outcome", lambda f: asdict(f.fleet.counts), "what"),
}
_INCUMBENTS: Rows = {
    "requests": counter(
        "Messages of Dynamo's routers, by outcome", lambda i: asdict(i.counts), "what"
    )
}


def dynamo_follower(
    settings: DynamoSettings,
    name: str,
    core: RouterCore,
    effect_runner: EffectRunner,
    metrics: RouterMetrics,
    shadow: Shadow | None,
    incarnation: int,
) -> DynamoFollower:
    """Return a follower of a Dynamo fleet, for the router of this name.

    `incarnation`: above that of any earlier process of this router.
    """
    fleet = DynamoFleet(core, settings, incarnation, multiplier=randbits(64) | 1)
    incumbents = None if shadow is None else Incumbents(core, fleet, shadow, settings)
    name = f"router {name} at Dynamo"
    follower = DynamoFollower(core, effect_runner, settings, fleet, incumbents, name)
    expose(metrics.registry, "kv_router_dynamo_", _METRICS, follower)
    if incumbents is not None:
        expose(metrics.registry, "kv_router_dynamo_", _INCUMBENTS, incumbents)
    effect_runner.add_reteller(follower.republish)
    return follower


def dynamo_settings(
    config: DynamoConfig, nats_url: str, naming: HashKeying
) -> DynamoSettings | None:
    """Return the settings of the configured Dynamo fleet, or None. Raises ConfigError.

    `nats_url`: the router's own server, used if the fleet has no other.
    """
    namespace, component = config.dynamo_namespace, config.dynamo_component
    if not namespace and not component:
        return None
    if not namespace or not component:
        missing = "dynamo_component" if namespace else "dynamo_namespace"
        raise ConfigError(missing, "missing", "a namespace and a component, or neither")
    if not config.dynamo_block_size:
        reason = "missing; Dynamo's events do not contain it"
        raise ConfigError("dynamo_block_size", reason, "the workers' kv_cache_block_size")
    nats_url = config.dynamo_nats_url or nats_url
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
        naming=naming,
    )
