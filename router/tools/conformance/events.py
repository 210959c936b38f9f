"""Engine events as the engines send them, and the texts that they are about."""

from hashlib import sha256
from typing import Any

from router.tools.conformance.steps import BLOCK_SIZE, Event, Prompt, Publish

VLLM_ARRAY_FIELDS = (
    "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium",
    "lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window",
)  # fmt: skip
"""Fields of BlockStored after its tag. Releases differ in the number that they send."""


def text(letter: str, blocks: int) -> tuple[int, ...]:
    """Return the token ids of `blocks` blocks. Texts of different letters share no block."""
    first = (ord(letter) - ord("a")) * 1_000 + 1
    return tuple(range(first, first + blocks * BLOCK_SIZE))


def prompt(token_ids: tuple[int, ...], **context: str) -> Prompt:
    """Return a request for a text."""
    return Prompt(token_ids, **context)


def hashes(token_ids: tuple[int, ...], engine_key: str = "") -> list[int]:
    """Return an engine's 64-bit names of a text's blocks, chained, of a hash of its own."""
    result, parent = [], engine_key.encode()
    for start in range(0, len(token_ids), BLOCK_SIZE):
        block = ",".join(map(str, token_ids[start : start + BLOCK_SIZE]))
        parent = sha256(parent + block.encode()).digest()
        result.append(int.from_bytes(parent[-8:], "big"))
    return result


def wide_hashes(token_ids: tuple[int, ...]) -> list[bytes]:
    """Return names of 32 bytes each."""
    return [sha256(name.to_bytes(8, "big")).digest() for name in hashes(token_ids)]


def signed(names: list[int]) -> list[int]:
    """Return the same 64 bits as signed numbers, as SGLang sends them."""
    return [name - 2**64 if name >= 2**63 else name for name in names]


def stored(
    token_ids: tuple[int, ...],
    first: int = 0,
    last: int | None = None,
    names: list[Any] | None = None,
    **fields: Any,
) -> dict[str, Any]:
    """Return vLLM 0.33's event for blocks `first` to `last` of a text. `names`: of all blocks."""
    names = hashes(token_ids) if names is None else names
    last = len(names) if last is None else last
    return {
        "type": "BlockStored",
        "block_hashes": names[first:last],
        "parent_block_hash": names[first - 1] if first else None,
        "token_ids": list(token_ids[first * BLOCK_SIZE : last * BLOCK_SIZE]),
        "block_size": BLOCK_SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        **fields,
    }


def placeholder(token_ids: tuple[int, ...], medium: str) -> dict[str, Any]:
    """Return the event of vLLM's offloading connector: blocks on another tier, by hash alone."""
    return stored(token_ids, medium=medium) | {"token_ids": [], "block_size": 0}


def removed(
    token_ids: tuple[int, ...],
    *blocks: int,
    names: list[Any] | None = None,
    medium: str | None = "GPU",
) -> dict[str, Any]:
    """Return the removal of these blocks of a text."""
    names = hashes(token_ids) if names is None else names
    return {
        "type": "BlockRemoved",
        "block_hashes": [names[block] for block in blocks],
        "medium": medium,
    }


def cleared() -> dict[str, Any]:
    """Return the event of a reset prefix cache."""
    return {"type": "AllBlocksCleared"}


def as_array(event: dict[str, Any], fields: int) -> list[Event]:
    """Return the event as a positional array with `fields` fields, vLLM's form up to 0.23."""
    if event["type"] == "BlockRemoved":
        return ["BlockRemoved", event["block_hashes"], event["medium"]][: fields + 1]
    return [event["type"], *[event.get(field) for field in VLLM_ARRAY_FIELDS[:fields]]]


def publish(*events: Event, **fields: Any) -> Publish:
    """Return one batch."""
    return Publish(events, **fields)


def each(token_ids: tuple[int, ...], **fields: Any) -> list[Publish]:
    """Return a batch for every block of a text."""
    count = len(token_ids) // BLOCK_SIZE
    return [publish(stored(token_ids, i, i + 1), **fields) for i in range(count)]
