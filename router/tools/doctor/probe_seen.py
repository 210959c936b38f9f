"""What was seen of the probe's requests: answers, and the events that belong to them."""

from collections.abc import Sequence
from typing import Literal, TypeAlias

from msgspec import Struct

from router.publisher.engine_batch import EngineStored
from router.tools.doctor.contents import keys_of

Kind: TypeAlias = Literal["plain", "again", "salted", "chat"]


class RequestSeen(Struct, frozen=True):
    """One request and its events.

    `blocks`: full blocks of its prompt; `announced_blocks`: of those, in events stored since it was
    sent (`again`: since `plain` was), and `salts` of these; `other_blocks`: stored meanwhile.
    `cached_tokens`: by the engine's word; None if it does not say. `problem`: why it failed.
    """

    kind: Kind
    blocks: int = 0
    announced_blocks: int = 0
    other_blocks: int = 0
    salts: frozenset[str | None] = frozenset()
    cached_tokens: int | None = None
    problem: str | None = None


class ProbeSeen(Struct, frozen=True):
    """All requests, by kind. `salt`: the one that was sent; `template_tokens`: how many more tokens
    the chat's prompt has than its text, None where the engine does not tokenise for others.
    """

    requests: dict[str, RequestSeen]
    salt: str
    template_tokens: int | None = None


def announced(kind: Kind, tokens: list[int], stored: Sequence[EngineStored]) -> RequestSeen:
    """Which blocks of a prompt these events announce. O(tokens × events).

    Those before the first that is announced do not count: they were cached before, such as those
    of a chat template's beginning.
    """
    mine: set[int] = set()
    salts: set[str | None] = set()
    others, blocks = 0, 0
    for event in stored:
        size = event.block_size or len(tokens) + 1
        blocks = max(blocks, len(tokens) // size)
        first = _place_of(event.tokens.tolist(), tokens, size)
        if first is None:
            others += len(event.block_hashes)
        else:
            mine.update(range(first, min(first + len(event.block_hashes), len(tokens) // size)))
            salts.add(keys_of(event).cache_salt)
    cached_before = min(mine, default=0)
    return RequestSeen(kind, blocks - cached_before, len(mine), others, frozenset(salts))


def _place_of(told: list[int], tokens: list[int], size: int) -> int | None:
    """At which block of the prompt the told tokens begin; what the engine generated may follow."""
    for first in range(len(tokens) // size):
        rest = tokens[first * size :]
        common = min(len(told), len(rest))
        if common >= size and told[:common] == rest[:common]:
            return first
    return None
