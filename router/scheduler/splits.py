"""Splits of a routing group's requests over other groups, by weight: blue and green, or a canary.

A split is a row of data. Which group a request goes to follows from its session, or else from the
beginning of its prompt: whatever asks again finds the group, and the blocks, of the time before.
Other weights move no more requests than they have to (weighted rendezvous hashing).
"""

import math
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np

from router.errors import ConfigError
from router.protocol.replies import SplitKey
from router.protocol.requests import PromptRequest
from router.protocol.values import U64_MAX, Scope

Weights: TypeAlias = Mapping[str, float]
"""Groups, and their shares of the requests in proportion."""

Splits: TypeAlias = Mapping[tuple[str, str | None], Weights]
"""By the group that requests name, and the model; None: every model that has no row of its own."""

NO_SPLITS: Splits = MappingProxyType({})

KEY_TOKENS = 512
"""The tokens of a prompt that choose its group: a longer prompt that grows stays in its group."""

_KEY_HASHES = 16
_ALLOWED = "GROUP[@MODEL]=GROUP:WEIGHT+GROUP:WEIGHT, separated by commas"


def parsed_splits(text: str) -> Splits:
    """Parse `group@model=group:weight+group:weight,…`. Raises ConfigError."""
    splits: dict[tuple[str, str | None], Weights] = {}
    for part in filter(None, (each.strip() for each in text.split(","))):
        named, equals, shares = (word.strip() for word in part.rpartition("="))
        group, at, model = named.partition("@")
        if not (group and equals and shares) or (at and not model):
            raise ConfigError("group_splits", repr(part), _ALLOWED)
        if (group, model or None) in splits:
            raise ConfigError("group_splits", f"{named!r} is named twice", "one split of each")
        splits[group, model or None] = _parsed_weights(part, shares)
    return MappingProxyType(splits)


def _parsed_weights(part: str, shares: str) -> Weights:
    weights: dict[str, float] = {}
    for share in shares.split("+"):
        group, _, number = (word.strip() for word in share.rpartition(":"))
        try:
            weight = float(number)
        except ValueError:
            weight = math.nan
        if not group or group in weights or not 0 <= weight <= 1e9:
            raise ConfigError("group_splits", repr(part), _ALLOWED)
        weights[group] = weight
    if not any(weights.values()):
        raise ConfigError("group_splits", repr(part), "a weight above 0")
    return MappingProxyType(weights)


def weights_of(splits: Splits, scope: Scope) -> Weights | None:
    """Return the weights for requests that name a scope; None if they are not split."""
    group, model = scope.routing_group, scope.model_name
    return splits.get((group, model)) or splits.get((group, None))


def split_from(splits: Splits, scope: Scope) -> list[str]:
    """Return the groups whose requests for this scope's model may come to it, in order."""
    named = {group for group, model in splits if model in (None, scope.model_name)}
    model = scope.model_name
    return sorted(
        group
        for group in named - {scope.routing_group}
        if scope.routing_group in (weights_of(splits, Scope(model, group)) or ())
    )


def split_key(request: PromptRequest) -> tuple[SplitKey, bytes]:
    """Return what of a request chooses its group; of one with nothing, always the same."""
    session_id = getattr(request, "session_id", None)
    if session_id is not None:
        return "session", session_id.encode("utf-8", "surrogatepass")
    if request.token_ids is not None:
        tokens: Any = request.token_ids[:KEY_TOKENS]
        return "prompt", np.asarray(tokens, np.uint64).tobytes()
    hashes = request.block_hashes or request.sequence_hashes or []
    return "prompt", b"".join(int(each).to_bytes(8, "little") for each in hashes[:_KEY_HASHES])


def chosen_group(weights: Weights, groups: Iterable[str], key: bytes) -> str:
    """Return one of the groups, by their weights and the key. O(groups)."""
    return min(groups, key=lambda group: (_distance(group, weights[group], key), group))


def _distance(group: str, weight: float, key: bytes) -> float:
    """Return an exponentially distributed number: the smallest of all is a group's by its share."""
    if not weight:
        return math.inf
    digest = blake2b(key, digest_size=8, key=blake2b(group.encode(), digest_size=16).digest())
    uniform = (int.from_bytes(digest.digest(), "little") + 1) / (U64_MAX + 2)
    return -math.log(uniform) / weight
