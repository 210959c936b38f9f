"""Observations of the probe's requests: responses, and the events that belong to them."""

from collections.abc import Sequence
from typing import Literal, TypeAlias

from msgspec import Struct

from router.publisher.engine_events.batch import EngineStored
from router.tools.doctor.event_totals import keys_of

Kind: TypeAlias = Literal["plain", "again", "salted", "chat"]


class ObservedRequest(Struct, frozen=True):
    """One request and its events.

    `blocks`: full blocks of its prompt. `announced_blocks`: those of them in events stored since it
    was sent (`again`: since `plain` was), and `salts` of these. `other_blocks`: others stored in
    that time. `cached_tokens`: the engine's count; None if it reports none. `problem`: the reason
    why the request failed.
    """

    kind: Kind
    blocks: int = 0
    announced_blocks: int = 0
    other_blocks: int = 0
    salts: frozenset[str | None] = frozenset()
    cached_tokens: int | None = None
    problem: str | None = None


class ObservedProbe(Struct, frozen=True):
    """All requests, by kind.

    `salt`: the one that was sent. `template_tokens`: the tokens that the chat template adds to the
    text; None if the engine has no /tokenize.
    """

    requests: dict[str, ObservedRequest]
    salt: str
    template_tokens: int | None = None


def announced(kind: Kind, tokens: list[int], stored: Sequence[EngineStored]) -> ObservedRequest:
    """Return the blocks of a prompt that these events contain. O(tokens × events).

    Blocks before the first published one do not count: they were cached before, for example those
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
    return ObservedRequest(kind, blocks - cached_before, len(mine), others, frozenset(salts))


def _place_of(announced_tokens: list[int], tokens: list[int], size: int) -> int | None:
    """Return the block of the prompt at which the tokens begin, or None; output may follow."""
    for first in range(len(tokens) // size):
        rest = tokens[first * size :]
        common = min(len(announced_tokens), len(rest))
        if common >= size and announced_tokens[:common] == rest[:common]:
            return first
    return None
