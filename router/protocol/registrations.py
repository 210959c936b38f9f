"""Instances and peers that callers register with an index alone, over HTTP as Dynamo's indexer."""

from typing import Annotated
from urllib.parse import urlsplit

from msgspec import Meta, Struct

from router.protocol.lookups import ScopeFields
from router.protocol.values import DpRank, Endpoint, Name, UInt


class _InstanceFields(ScopeFields, frozen=True, kw_only=True):
    instance_id: UInt
    model_name: Name


class RegisterRequest(_InstanceFields, frozen=True, kw_only=True):
    """Read the events of this rank from now on. `endpoint`: `nats`, or `nats://…`."""

    endpoint: Endpoint
    block_size: Annotated[int, Meta(ge=1, le=65_536)]
    dp_rank: DpRank = 0
    replay_endpoint: str | None = None
    additional_salt: str | None = None


class UnregisterRequest(_InstanceFields, frozen=True, kw_only=True):
    """Forget this rank of an instance; without `dp_rank`, the instance."""

    dp_rank: DpRank | None = None


class PeerRequest(Struct, frozen=True):
    """Another indexer."""

    url: Annotated[str, Meta(min_length=1, max_length=1024)]


def is_http_url(url: str) -> bool:
    """Whether a peer could be found there."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


class ListenerView(Struct, frozen=True, omit_defaults=True):
    """One rank: where its events come from, and whether its index can be relied on.

    `active`: it can; `pending`: nothing was read yet; `degraded`: see `reason`.
    """

    endpoint: str
    status: str
    reason: str | None = None


class InstanceView(Struct, frozen=True):
    """One instance, with the worst status of its ranks."""

    instance_id: int
    source: str
    status: str
    model_name: str
    routing_group: str
    block_size: int
    endpoints: dict[str, str]
    listeners: dict[str, ListenerView]
