"""What an engine's events say, added up over all that was heard, live or replayed."""

from collections import Counter
from collections.abc import Iterator

from router.errors import WireError
from router.publisher.engine_batch import EngineBatch, EngineRemoved, EngineStored
from router.publisher.engine_events import bounded_name, decode_engine_batch
from router.publisher.extra_keys import EventKeys, read_extra_keys

NO_MEDIUM = "none"
"""An event that names no medium means the device."""

_MAX_SENTENCES = 3
_MAX_NAMES = 32


class Contents:
    """Counts of blocks by what matters to a router, unless a name says otherwise."""

    __slots__ = (
        "batches",
        "block_sizes",
        "cleared_events",
        "dp_ranks",
        "eagle_events",
        "groups",
        "lora_names",
        "malformed",
        "malformed_events",
        "mediums",
        "mm_blocks",
        "opaque_blocks",
        "placeholders",
        "removed",
        "salts",
        "stored",
        "unknown_types",
        "unreadable_batches",
    )

    def __init__(self) -> None:
        self.batches = 0
        self.unreadable_batches = 0
        self.malformed: list[str] = []
        """The first few sentences about what could not be read."""
        self.malformed_events = 0
        self.unknown_types: Counter[str] = Counter()
        self.dp_ranks: Counter[int] = Counter()
        """Batches by rank; those that name none are not counted."""
        self.block_sizes: Counter[int] = Counter()
        self.stored = 0
        self.removed = 0
        self.cleared_events = 0
        self.placeholders = 0
        self.mediums: Counter[str] = Counter()
        self.groups: Counter[tuple[int, str | None]] = Counter()
        self.lora_names: Counter[str] = Counter()
        self.salts: Counter[str] = Counter()
        """Events that name one; values are never repeated to anybody."""
        self.mm_blocks = 0
        self.opaque_blocks = 0
        self.eagle_events = 0

    def add(self, payload: bytes) -> EngineBatch | None:
        """Add what one message says; the batch, or None if it is none. O(bytes)."""
        self.batches += 1
        try:
            batch = decode_engine_batch(payload)
        except WireError as error:
            self.unreadable_batches += 1
            self._complain(error.reason)
            return None
        if batch.dp_rank is not None:
            self.dp_ranks[batch.dp_rank] += 1
        self.unknown_types.update(batch.unknown)
        self.malformed_events += len(batch.malformed)
        for sentence in batch.malformed:
            self._complain(sentence)
        for event in batch.events:
            if isinstance(event, EngineStored):
                self._add_stored(event)
            elif isinstance(event, EngineRemoved):
                self.removed += len(event.block_hashes)
            else:
                self.cleared_events += 1
        return batch

    def _add_stored(self, event: EngineStored) -> None:
        blocks = len(event.block_hashes)
        self.stored += blocks
        self.mediums[_named(event.medium)] += blocks
        self.groups[event.group, event.spec_kind] += blocks
        self.eagle_events += event.is_eagle
        if event.block_size:
            self.block_sizes[event.block_size] += blocks
        else:
            self.placeholders += blocks
        self._add_keys(event)

    def _add_keys(self, event: EngineStored) -> None:
        keys = keys_of(event)
        if keys.lora_name and len(self.lora_names) < _MAX_NAMES:
            self.lora_names[bounded_name(keys.lora_name)] += 1
        if keys.cache_salt and len(self.salts) < _MAX_NAMES:
            self.salts[keys.cache_salt] += 1
        self.mm_blocks += sum(bool(block.mm_hashes) for block in keys.blocks.values())
        self.opaque_blocks += sum(bool(block.opaque) for block in keys.blocks.values())

    def _complain(self, sentence: str) -> None:
        if len(self.malformed) < _MAX_SENTENCES:
            self.malformed.append(sentence)


def keys_of(event: EngineStored) -> EventKeys:
    """LoRA, salt and what else the blocks of an event are cached for."""
    keys = EventKeys(event.lora_name, event.cache_salt)
    is_root = event.parent is None
    return read_extra_keys(event.extra_keys or (), keys, len(event.block_hashes), is_root=is_root)


def stored_in(batch: EngineBatch | None) -> Iterator[EngineStored]:
    """The stored events of a batch."""
    for event in batch.events if batch is not None else ():
        if isinstance(event, EngineStored):
            yield event


def _named(medium: str | None) -> str:
    return NO_MEDIUM if medium is None else bounded_name(medium)
