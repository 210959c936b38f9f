"""Batches as they were captured, engine by engine (`engine_events.json` beside this file).

Played from rank 0, whatever rank they were captured from, but for the one that is about ranks.
"""

from pathlib import Path
from typing import Any

import msgspec

from ..steps import Ask, Prompt, Publish, Scenario

VECTORS = Path(__file__).with_name("engine_events.json")
FIRST = "vllm 0.33: three blocks from the root"
SGLANG = "sglang 0.5.23: signed hashes, host tier, salt and session"
RANKS = "vllm 0.33: child of block 22, rank 3"

FOREIGN_RANK = "whose a batch is that names another rank than its socket's is a matter of trust."

TWELVE = Prompt(tuple(range(1, 13)))
ASKED: dict[str, tuple[str, tuple[tuple[Prompt, int], ...]]] = {
    FIRST: ("", ((TWELVE, 3),)),
    RANKS: (FIRST, ((Prompt((*range(1, 9), *range(13, 17))), 2),)),
    "vllm 0.33: removed two": (FIRST, ((TWELVE, 1),)),
    "vllm 0.33: cleared": (FIRST, ((TWELVE, 0),)),
    "vllm 0.33: 32-byte hashes": ("", ((TWELVE, 2),)),
    "vllm 0.33: salt on block 0, lora on all": (
        "",
        (
            (Prompt(TWELVE.token_ids, "ad", "salt-A"), 2),
            (Prompt(TWELVE.token_ids, "ad"), 0),
            (TWELVE, 0),
        ),
    ),
    "vllm 0.33: multimodal hash with offset": ("", ((TWELVE, 0),)),
    "vllm 0.33: cpu tier placeholder (no tokens)": (FIRST, ((TWELVE, 3),)),
    "vllm 0.33: sliding-window group": ("", ((TWELVE, 0),)),
    "vllm 0.9 array, 6 fields, batch without rank": ("", ((TWELVE, 2),)),
    "vllm 0.23 array with extra keys": ("", ((TWELVE, 0),)),
    "unknown event type beside a good one": ("", ((TWELVE, 1),)),
    "malformed event beside a good one": ("", ((TWELVE, 1),)),
    SGLANG: ("", ((Prompt(TWELVE.token_ids, cache_salt="t"), 2), (TWELVE, 0))),
    "sglang 0.5.23: removed and cleared": (
        SGLANG,
        ((Prompt(TWELVE.token_ids, cache_salt="t"), 2),),
    ),
}
"""What comes before each, and what is asked after it."""


def scenarios() -> list[Scenario]:
    """One for every vector."""
    batches = {
        vector["name"]: vector["decoded"] for vector in msgspec.json.decode(VECTORS.read_bytes())
    }
    return [_scenario(name, batches) for name in batches]


def _scenario(name: str, batches: dict[str, list[Any]]) -> Scenario:
    before, asked = ASKED[name]
    steps = [_publish(each, batches[each]) for each in (before, name) if each]
    asks = [Ask(prompt, (blocks,)) for prompt, blocks in asked]
    convention = FOREIGN_RANK if name == RANKS else ""
    return Scenario(name, "captured batches", (*steps, *asks), convention=convention)


def _publish(name: str, batch: list[Any]) -> Publish:
    events = tuple(_with_bytes(event) for event in batch[1])
    rank = (batch[2] if name == RANKS else 0) if len(batch) > 2 else None
    return Publish(events, rank=rank)


def _with_bytes(value: Any) -> Any:
    match value:
        case {"bytes_hex": digits}:
            return bytes.fromhex(digits)
        case dict():
            return {key: _with_bytes(item) for key, item in value.items()}
        case list():
            return [_with_bytes(item) for item in value]
    return value
