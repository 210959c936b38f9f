"""The event sockets of an engine's ranks, as its server names them."""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct


class RankSockets(Struct, frozen=True):
    """The event sockets of one rank, as its engine names them: addresses that it listens on."""

    events: str
    replay: str | None = None
    topic: str = ""
    load: str | None = None


class _VllmSource(Struct, frozen=True):
    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""
    publisher: str = "zmq"
    enable_kv_cache_events: bool = True


class _SglangEvents(Struct, frozen=True):
    endpoint_port_base: int
    publisher: str = "zmq"
    endpoint_host: str = "*"
    dp_size: Annotated[int, Meta(ge=1, le=1024)] = 1
    topic: str = ""
    replay_endpoint_port_base: int | None = None
    load_endpoint_port_base: int | None = None


def vllm_sockets(sources: Mapping[str, Any]) -> dict[int, RankSockets] | None:
    """Return the sockets in a response of vLLM's `/kv_event_sources`; None if it is malformed.

    Its keys are ranks, in any order; ports are final.
    """
    try:
        ranks = msgspec.convert(sources, dict[int, _VllmSource], strict=False)
    except msgspec.ValidationError:
        return None
    return {
        dp_rank: RankSockets(each.endpoint, each.replay_endpoint or None, each.topic)
        for dp_rank, each in sorted(ranks.items())
        if each.enable_kv_cache_events and each.publisher == "zmq"
    }


def sglang_sockets(kv_events: object) -> dict[int, RankSockets] | None:
    """Return the sockets in `kv_events` of SGLang's `/server_info`; None if it is malformed.

    A rank's port is the first one plus its number.
    """
    if kv_events is None:
        return {}
    try:
        said = msgspec.convert(kv_events, _SglangEvents)
    except msgspec.ValidationError:
        return None
    if said.publisher != "zmq":
        return {}

    def address(base: int | None, dp_rank: int) -> str | None:
        return None if base is None else f"tcp://{said.endpoint_host}:{base + dp_rank}"

    return {
        dp_rank: RankSockets(
            f"tcp://{said.endpoint_host}:{said.endpoint_port_base + dp_rank}",
            address(said.replay_endpoint_port_base, dp_rank),
            said.topic,
            address(said.load_endpoint_port_base, dp_rank),
        )
        for dp_rank in range(said.dp_size)
    }
