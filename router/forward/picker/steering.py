"""Headers and hints of gateways and clients that steer the placement of a request. Pure.

Sources: GIE proposal 004; llm-d-router `pkg/epp/metadata`; Dynamo `lib/.../ext-proc`.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Struct

from router.errors import InvalidFieldError
from router.forward.headers import (
    DP_RANK,
    PREFILL_INSTANCE_ID,
    WORKER_ID,
    WORKER_INSTANCE_ID,
    Pairs,
)

DESTINATION = "x-gateway-destination-endpoint"
SERVED = "x-gateway-destination-endpoint-served"
SUBSET = "x-gateway-destination-endpoint-subset"
PREFILLER = "x-prefiller-host-port"
"""The header in which llm-d's and Dynamo's decode workers find the prefill worker."""
DROPPED_REASON = "x-llm-d-request-dropped-reason"

LB = "envoy.lb"
SUBSET_HINT = "envoy.lb.subset_hint"
EXT_PROC = "envoy.filters.http.ext_proc"
UPSTREAM = "upstream.address"

_OBJECTIVE = (b"x-llm-d-inference-objective", b"x-gateway-inference-objective")
_REWRITE = (b"x-llm-d-model-name-rewrite", b"x-gateway-model-name-rewrite")
_PREFER = b"prefer"
_IF_AVAILABLE = b"if-available"

_NOT_FOR_ENGINES = frozenset(
    (
        *_OBJECTIVE,
        *_REWRITE,
        b"x-llm-d-inference-fairness-id",
        b"x-gateway-inference-fairness-id",
        b"x-llm-d-slo-ttft-ms",
        b"x-llm-d-slo-tpot-ms",
        b"x-slo-ttft-ms",
        b"x-slo-tpot-ms",
        b"x-kv-router-slo-ttft-ms",
        b"x-kv-router-slo-tpot-ms",
        b"x-gateway-model-name",
        DESTINATION.encode(),
        SERVED.encode(),
        SUBSET.encode(),
        PREFILLER.encode(),
        b"x-encoder-hosts-ports",
        b"x-data-parallel-host-port",
        DP_RANK,
        WORKER_ID,
        WORKER_INSTANCE_ID,
        PREFILL_INSTANCE_ID,
    )
)
"""Headers that steer the gateway or the engines: a client's own never reach an engine."""

MOST_MODEL_CHARACTERS = 256


class Steering(Struct, frozen=True):
    """The headers of a request that steer its placement.

    `objective`: the name of an InferenceObjective. `model`: the name that replaces the body's.
    `if_available`: refuse the request in place of letting it wait. `removed`: names of headers that
    are there and that engines must not receive.
    """

    objective: str | None = None
    model: str | None = None
    if_available: bool = False
    removed: tuple[str, ...] = ()


NO_STEERING = Steering()


def steering_in(headers: Pairs) -> Steering:
    """Return what the headers of a request ask for. O(headers).

    Raises InvalidFieldError for a model name that is too long.
    """
    given = {name: value for name, value in reversed(headers) if name in _READ}
    if not given:
        return NO_STEERING
    model = _first(given, _REWRITE)
    if model is not None and len(model) > MOST_MODEL_CHARACTERS:
        allowed = f"at most {MOST_MODEL_CHARACTERS}"
        raise InvalidFieldError(_REWRITE[1].decode(), f"{len(model)} characters", allowed)
    preferences = given.get(_PREFER, b"").lower().split(b",")
    return Steering(
        _first(given, _OBJECTIVE),
        model,
        any(each.strip() == _IF_AVAILABLE for each in preferences),
        tuple(name.decode() for name in given if name in _NOT_FOR_ENGINES),
    )


_READ = _NOT_FOR_ENGINES | {_PREFER}


def _first(given: Mapping[bytes, bytes], names: Iterable[bytes]) -> str | None:
    for name in names:
        value = given.get(name, b"").decode("latin-1").strip()
        if value:
            return value
    return None


def subset_of(hint: Mapping[str, Any] | None) -> frozenset[str] | None:
    """Return the addresses that a request is limited to. Returns None without a hint.

    `hint`: the fields of the namespace `envoy.lb.subset_hint`. A list, or a text with commas; list
    elements may have commas as well, since rules that copy headers write texts. Elements that are
    no text are ignored, so that an empty set, which no endpoint is in, remains.
    """
    if hint is None or SUBSET not in hint:
        return None
    value = hint[SUBSET]
    listed = [value] if isinstance(value, str) else value
    try:
        texts = [each for each in listed if isinstance(each, str)]
    except TypeError:  # a number or null
        texts = []
    return frozenset(word.strip() for text in texts for word in text.split(",") if word.strip())


def in_subset(addresses: Iterable[str], subset: frozenset[str]) -> list[bool]:
    """Return whether each address is in a subset, which may contain it without its port."""
    hosts = {each.strip("[]") for each in subset}
    return [each in subset or each.rpartition(":")[0].strip("[]") in hosts for each in addresses]


def served_address(metadata: Mapping[str, Any], attributes: Mapping[str, Any]) -> str | None:
    """Return the endpoint that served a request, as the gateway reports it. Returns None if not.

    Of a list, the last one: the gateway tried the others before.
    """
    found = metadata.get(LB, {}).get(SERVED) or attributes.get(EXT_PROC, {}).get(UPSTREAM)
    if not isinstance(found, str):
        return None
    return found.rpartition(",")[2].strip() or None
