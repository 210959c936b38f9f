"""An exact model of an engine's cache, by the engine's own rules: the truth of every question.

It follows every batch, also those that no router receives. A block is its tokens in the context of
all tokens before them, with the LoRA, salt and images that they were computed with. On each tier it
is held as often as it was stored and not removed, until the engine clears or dies.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from router.tools.conformance.events import VLLM_ARRAY_FIELDS
from router.tools.conformance.steps import (
    BLOCK_SIZE,
    EngineSpec,
    Event,
    Prompt,
    Publish,
    Restart,
    Salt,
    Step,
)

FULL_ATTENTION = (None, "full_attention", "mla_attention", "sink_full_attention")


class Block(Struct, frozen=True):
    """The meaning of a name. LoRA and salt are those of the first block of a chain."""

    parent: Any
    token_ids: tuple[int, ...]
    lora: Any = None
    salt: str | None = None
    others: tuple[str, ...] = ()


class EngineCache:
    """The cache of one engine."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._blocks: dict[Any, Block] = {}
        """By every name that the engine used in this life."""
        self._copies: Counter[tuple[Any, str]] = Counter()

    def apply(self, event: Event) -> None:
        """Apply an event. A malformed or unknown one changes nothing."""
        fields = _as_map(event)
        match fields.get("type"):
            case "BlockStored":
                self._store(fields)
            case "BlockRemoved":
                self._remove(fields)
            case "AllBlocksCleared":
                self._clear()

    def restart(self) -> None:
        """Begin another life with an empty cache."""
        self._blocks.clear()
        self._copies.clear()

    def cached_blocks(self, prompt: Prompt) -> int:
        """Return the number of leading blocks of a prompt that a request would find."""
        held = {name for (name, _), copies in self._copies.items() if copies > 0}
        names: set[Any] = {None}
        lora, salt, count = prompt.lora_name, prompt.cache_salt, 0
        for token_ids in _split(prompt.token_ids):
            wanted = [Block(parent, token_ids, lora, salt) for parent in names]
            names = {name for name, block in self._blocks.items() if block in wanted}
            if names.isdisjoint(held):
                break
            count += 1
            lora = salt = None
        return count

    def _store(self, fields: dict[str, Any]) -> None:
        names = fields.get("block_hashes")
        if not isinstance(names, list) or not _is_possible(names, fields):
            return
        if fields.get("kv_cache_spec_kind") not in FULL_ATTENTION:
            return
        if fields["token_ids"]:
            self._name(names, fields)
        medium = fields.get("medium") or "GPU"
        for name in map(_bits, names):
            if name in self._blocks:
                copies = self._copies[name, medium]
                self._copies[name, medium] = 1 if self._spec.reannounces else copies + 1

    def _name(self, names: list[Any], fields: dict[str, Any]) -> None:
        parent, size = _bits(fields["parent_block_hash"]), fields["block_size"]
        keys = fields.get("extra_keys") or [None] * len(names)
        for i, name in enumerate(names):
            token_ids = tuple(fields["token_ids"][i * size : (i + 1) * size])
            salt, others = _contexts(keys[i], fields)
            if parent is None:
                block = Block(parent, token_ids, _lora(fields), salt, others)
            else:
                block = Block(parent, token_ids, others=others)
            self._blocks[_bits(name)] = block
            parent = _bits(name)

    def _remove(self, fields: dict[str, Any]) -> None:
        medium = fields.get("medium") or "GPU"
        for name in fields["block_hashes"]:
            if self._copies[_bits(name), medium] > 0:
                self._copies[_bits(name), medium] -= 1

    def _clear(self) -> None:
        """Clear the device of a vLLM, which keeps what it offloaded, and all tiers of an SGLang."""
        clears_all = self._spec.kind == "sglang"
        for key in [key for key in self._copies if clears_all or key[1] == "GPU"]:
            del self._copies[key]


class Oracle:
    """The caches of all engines of a scenario."""

    def __init__(self, engines: Sequence[EngineSpec]) -> None:
        self._caches = [EngineCache(spec) for spec in engines]

    def follow(self, step: Step) -> None:
        """Apply an action of an engine; other steps change no cache."""
        match step:
            case Publish(rank=0 | None):  # blocks of another rank are not held by this one
                for event in step.events:
                    self._caches[step.engine].apply(event)
            case Restart():
                self._caches[step.engine].restart()

    def cached_blocks(self, prompt: Prompt) -> tuple[int, ...]:
        """Return the leading cached blocks of every engine."""
        return tuple(cache.cached_blocks(prompt) for cache in self._caches)


def _as_map(event: Event) -> dict[str, Any]:
    match event:
        case dict():
            return event
        case ["BlockStored", *values]:
            return {"type": "BlockStored", **dict(zip(VLLM_ARRAY_FIELDS, values, strict=False))}
        case ["BlockRemoved", names, *medium]:
            return {"type": "BlockRemoved", "block_hashes": names, "medium": (*medium, None)[0]}
        case [kind]:
            return {"type": kind}
    return {}


def _bits(name: Any) -> Any:
    """Return one name for signed and unsigned 64-bit names of the same bits."""
    return name % 2**64 if isinstance(name, int) else name


def _split(token_ids: tuple[int, ...]) -> list[tuple[int, ...]]:
    whole = len(token_ids) // BLOCK_SIZE * BLOCK_SIZE
    return [token_ids[start : start + BLOCK_SIZE] for start in range(0, whole, BLOCK_SIZE)]


def _is_possible(names: list[Any], fields: dict[str, Any]) -> bool:
    """Return False if two blocks have one name, or a block is its own parent."""
    return len({*names, fields["parent_block_hash"]}) == len(names) + 1


def _lora(fields: dict[str, Any]) -> Any:
    return fields.get("lora_name") or fields.get("lora_id")


def _contexts(keys: Any, fields: dict[str, Any]) -> tuple[str | None, tuple[str, ...]]:
    """Return the salt of a block, and its images and embeddings."""
    lora = fields.get("lora_name")
    others = tuple(repr(key) for key in keys or () if key != lora and not isinstance(key, Salt))
    salts = [key.value for key in keys or () if isinstance(key, Salt)]
    return (salts[0] if salts else fields.get("cache_salt")), others
