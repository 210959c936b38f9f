"""Totals over an engine's events, live or replayed."""

from collections import Counter
from collections.abc import Iterator

from router.errors import WireError
from router.publisher.engine_events.batch import EngineBatch, EngineRemoved, EngineStored
from router.publisher.engine_events.decoder import bounded_name, decode_engine_batch
from router.publisher.engine_events.extra_keys import EventKeys, read_extra_keys

NO_MEDIUM = "none"
"""The name of an event's missing medium, which means the device."""

_MAX_SENTENCES = 3
_MAX_NAMES = 32


class EventTotals:
    """Counts of blocks, unless a name states another unit."""

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
        "unknown_field",
        "unknown_types",
        "unreadable_batches",
    )

    def __init__(self) -> None:
        self.batches = 0
        self.unreadable_batches = 0
        self.malformed: list[str] = []
        """The first few reasons why batches or events could not be read."""
        self.malformed_events = 0
        self.unknown_types: Counter[str] = Counter()
        self.unknown_field: str | None = None
        """The sentence about the first field that is unknown, and makes the rank degraded."""
        self.dp_ranks: Counter[int] = Counter()
        """Batches by rank; batches that contain no rank are not counted."""
        self.block_sizes: Counter[int] = Counter()
        self.stored = 0
        self.removed = 0
        self.cleared_events = 0
        self.placeholders = 0
        self.mediums: Counter[str] = Counter()
        self.groups: Counter[tuple[int, str | None]] = Counter()
        self.lora_names: Counter[str] = Counter()
        self.salts: Counter[str] = Counter()
        """Events that contain a salt; the values are never printed."""
        self.mm_blocks = 0
        self.opaque_blocks = 0
        self.eagle_events = 0

    def add(self, payload: bytes) -> EngineBatch | None:
        """Add a message; return its batch, or None if it is not one. O(bytes)."""
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
        self.unknown_field = self.unknown_field or batch.unknown_field
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
    """Return the LoRA adapter, the salt and other keys of an event's blocks."""
    keys = EventKeys(event.lora_name, event.cache_salt)
    is_root = event.parent is None
    return read_extra_keys(event.extra_keys or (), keys, len(event.block_hashes), is_root=is_root)


def stored_in(batch: EngineBatch | None) -> Iterator[EngineStored]:
    """Yield the stored events of a batch."""
    for event in batch.events if batch is not None else ():
        if isinstance(event, EngineStored):
            yield event


def _named(medium: str | None) -> str:
    return NO_MEDIUM if medium is None else bounded_name(medium)
