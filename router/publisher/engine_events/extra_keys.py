"""The extra keys that engines include in a block's hash in addition to its tokens.

vLLM sends a list per block, untagged: the LoRA's name, `(identifier, offset)` for each multimodal
object, the salt (on the first block of a prompt only), digests of prompt embeddings. Later versions
tag them: `("lora", name, path)`, `("mm", identifier, offset)`, `("cache_salt", salt)`. Any other
key is opaque: its block gets a sequence hash that no request has.
"""

import re
from collections.abc import Iterable, Sequence

from msgspec import Struct, msgpack
from xxhash import xxh3_64_intdigest

_DIGEST = re.compile("[0-9a-fA-F]{64}")


class BlockKeys(Struct):
    """The keys that one block's local hash covers in addition to its tokens."""

    mm_hashes: list[int] = []
    opaque: bytes = b""


class EventKeys(Struct):
    """The keys of an event; `blocks`: those of blocks that have more than LoRA and salt."""

    lora_name: str | None
    cache_salt: str | None
    blocks: dict[int, BlockKeys] = {}


def mm_hash(identifier: str) -> int:
    """Return the u64 of a multimodal object: the start of a digest identifier, else its hash."""
    if _DIGEST.fullmatch(identifier):
        return int(identifier[:16], 16)
    return xxh3_64_intdigest(identifier.encode())


def read_extra_keys(
    extra_keys: Sequence[object], keys: EventKeys, block_count: int, *, is_root: bool
) -> EventKeys:
    """Add the blocks' keys to the event's own `keys`, and return these.

    `is_root`: the first block begins a prompt; then an untagged name there that is not the
    LoRA's is the salt.
    """
    usual = (keys.lora_name,)  # Most blocks of a LoRA have only its name.
    for index, block_keys in enumerate(extra_keys[:block_count]):
        if block_keys and block_keys != usual:
            reader = _BlockReader(keys, may_salt=is_root and index == 0)
            reader.read(_listed(block_keys))
            if reader.block.mm_hashes or reader.block.opaque:
                keys.blocks[index] = reader.block
    return keys


def _listed(block_keys: object) -> Iterable[object]:
    return block_keys if isinstance(block_keys, list | tuple) else [block_keys]


class _BlockReader:
    __slots__ = ("_keys", "_may_salt", "block")

    def __init__(self, keys: EventKeys, *, may_salt: bool) -> None:
        self._keys = keys
        self._may_salt = may_salt
        self.block = BlockKeys()

    def read(self, block_keys: Iterable[object]) -> None:
        is_lora_due = True
        for key in block_keys:
            if is_lora_due and key == self._keys.lora_name:
                is_lora_due = False
            elif not (self._read_name(key) if isinstance(key, str) else self._read_tuple(key)):
                self.block.opaque += msgpack.encode(key)

    def _read_name(self, name: str) -> bool:
        if self._may_salt and self._keys.cache_salt in (None, name):
            self._keys.cache_salt = name
            self._may_salt = False
        return name == self._keys.cache_salt

    def _read_tuple(self, key: object) -> bool:
        match key:
            case [str(identifier), int()] | ["mm", str(identifier), *_]:
                self.block.mm_hashes.append(mm_hash(identifier))
            case ["cache_salt", str(salt)] if self._keys.cache_salt in (None, salt):
                self._keys.cache_salt = salt
            case ["lora", str(name), *_] if self._keys.lora_name in (None, name):
                self._keys.lora_name = name
            case _:
                return False
        return True
