"""What an engine holds, by the engine's own rules: the truth that answers are compared with.

It sees every batch, also those that reach nobody. A block is its tokens in the context of all
tokens before them, with the LoRA, salt and images they were computed with; it is held as often as
it was stored and not removed, on each tier, until the engine clears or dies.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from .events import VLLM_ARRAY_FIELDS
from .steps import BLOCK_SIZE, Event, Prompt, Publish, Restart, Step

FULL_ATTENTION = (None, "full_attention", "mla_attention", "sink_full_attention")
DEVICE = ("GPU", None)


class Block(Struct, frozen=True):
    """What a name stands for. LoRA and salt are those of the first block of a chain."""

    parent: Any
    token_ids: tuple[int, ...]
    lora: Any = None
    salt: str | None = None
    others: tuple[str, ...] = ()


class EngineCache:
    """One engine."""

    def __init__(self, reannounces: bool = False) -> None:
        self._reannounces = reannounces
        self._blocks: dict[Any, Block] = {}
        """Every name the engine ever used."""
        self._copies: Counter[tuple[Any, str]] = Counter()

    def apply(self, event: Event) -> None:
        """Do what an event says; one that is none says nothing."""
        fields = _as_map(event)
        match fields.get("type"):
            case "BlockStored":
                self._store(fields)
            case "BlockRemoved":
                self._remove(fields)
            case "AllBlocksCleared":
                self._clear(DEVICE)

    def restart(self) -> None:
        """Another life: nothing is held."""
        self._blocks.clear()
        self._copies.clear()

    def cached_blocks(self, prompt: Prompt) -> int:
        """Leading blocks of a prompt that a request would find."""
        held = {name for (name, _), copies in self._copies.items() if copies > 0}
        names: set[Any] = {None}
        lora, salt, count = prompt.lora_name, prompt.cache_salt, 0
        for count, token_ids in enumerate(_split(prompt.token_ids)):
            wanted = [Block(parent, token_ids, lora, salt) for parent in names]
            names = {name for name, block in self._blocks.items() if block in wanted}
            if names.isdisjoint(held):
                return count
            lora = salt = None
        return count + 1

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
                self._copies[name, medium] = 1 if self._reannounces else copies + 1

    def _name(self, names: list[Any], fields: dict[str, Any]) -> None:
        parent, size = _bits(fields["parent_block_hash"]), fields["block_size"]
        keys = fields.get("extra_keys") or [None] * len(names)
        for i, name in enumerate(names):
            token_ids = tuple(fields["token_ids"][i * size : (i + 1) * size])
            salt, others = _told_apart(keys[i], fields)
            context = (_lora(fields), salt) if parent is None else (None, None)
            self._blocks[_bits(name)] = Block(parent, token_ids, *context, others)
            parent = _bits(name)

    def _remove(self, fields: dict[str, Any]) -> None:
        medium = fields.get("medium") or "GPU"
        for name in fields["block_hashes"]:
            if self._copies[_bits(name), medium] > 0:
                self._copies[_bits(name), medium] -= 1

    def _clear(self, mediums: Sequence[str | None]) -> None:
        for key in [key for key in self._copies if key[1] in mediums]:
            del self._copies[key]


class Oracle:
    """All engines of a scenario."""

    def __init__(self, reannounces: Sequence[bool]) -> None:
        self._caches = [EngineCache(again) for again in reannounces]

    def follow(self, step: Step) -> None:
        """An engine did something."""
        match step:
            case Publish(rank=0 | None):  # what another rank holds is not held by this one
                for event in step.events:
                    self._caches[step.engine].apply(event)
            case Restart():
                self._caches[step.engine].restart()

    def cached_blocks(self, prompt: Prompt) -> tuple[int, ...]:
        """Of every engine."""
        return tuple(cache.cached_blocks(prompt) for cache in self._caches)


def _as_map(event: Event) -> dict[str, Any]:
    if isinstance(event, dict):
        return event
    match event:
        case ["BlockStored", *values]:
            return {"type": "BlockStored", **dict(zip(VLLM_ARRAY_FIELDS, values, strict=False))}
        case ["BlockRemoved", names, *medium]:
            return {"type": "BlockRemoved", "block_hashes": names, "medium": (*medium, None)[0]}
        case [kind]:
            return {"type": kind}
    return {}


def _bits(name: Any) -> Any:
    """Signed and unsigned 64-bit names of the same bits are one name."""
    return name % 2**64 if isinstance(name, int) else name


def _split(token_ids: tuple[int, ...]) -> list[tuple[int, ...]]:
    whole = len(token_ids) // BLOCK_SIZE * BLOCK_SIZE
    return [token_ids[start : start + BLOCK_SIZE] for start in range(0, whole, BLOCK_SIZE)]


def _is_possible(names: list[Any], fields: dict[str, Any]) -> bool:
    """No engine names two of its blocks alike, or a block after itself."""
    return len({*names, fields["parent_block_hash"]}) == len(names) + 1


def _lora(fields: dict[str, Any]) -> Any:
    return fields.get("lora_name") or fields.get("lora_id")


def _told_apart(keys: Any, fields: dict[str, Any]) -> tuple[str | None, tuple[str, ...]]:
    """The salt, and what else a block was computed with: images, embeddings."""
    names = [key for key in keys or () if isinstance(key, str) and key != fields.get("lora_name")]
    salt = names[0] if names else fields.get("cache_salt")
    return salt, tuple(repr(key) for key in keys or () if not isinstance(key, str))
