"""The form of an engine's messages, which the decoder reads but does not keep.

The meaning of the events is not examined here.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from router.protocol.values import UNREADABLE
from router.publisher.engine_events._event_rows import EVENT_TYPES, FIELDS, HARMLESS_FIELDS
from router.publisher.engine_events.decoder import bounded_name

_KNOWN_FIELDS = frozenset((*FIELDS, *HARMLESS_FIELDS))
_MAX_NAMES = 32


class WireForms:
    """The form of the messages so far; counts are of events unless stated otherwise."""

    __slots__ = (
        "arrays",
        "batches_without_rank",
        "hash_kinds",
        "longest_array",
        "maps",
        "maps_without_lora_name",
        "unknown_fields",
    )

    def __init__(self) -> None:
        self.maps = 0
        self.arrays = 0
        self.longest_array = 0
        """Elements of a stored event, including its type."""
        self.maps_without_lora_name = 0
        """Stored events without it: vLLM always sends the field, SGLang only for a LoRA."""
        self.batches_without_rank = 0
        self.hash_kinds: Counter[str] = Counter()
        """Counts of blocks: `unsigned`, `signed` (below 0), or the number of bytes."""
        self.unknown_fields: Counter[str] = Counter()
        """By name, of maps; fields that are null are unset, and not counted."""

    def add(self, payload: bytes) -> None:
        """Examine one message; ignores any that is not a batch. O(bytes)."""
        try:
            batch = msgspec.msgpack.decode(payload)
        except UNREADABLE:
            return
        if not isinstance(batch, list) or len(batch) < 2 or not isinstance(batch[1], list):
            return
        self.batches_without_rank += len(batch) < 3 or batch[2] is None
        for event in batch[1]:
            if isinstance(event, Mapping):
                self._add_map(event)
            elif isinstance(event, list):
                self._add_array(event)

    def _add_map(self, event: Mapping[Any, Any]) -> None:
        self.maps += 1
        is_stored = event.get("type") == "BlockStored"
        self.maps_without_lora_name += is_stored and "lora_name" not in event
        if event.get("type") in EVENT_TYPES:
            for name in event.keys() - _KNOWN_FIELDS:
                if event[name] is not None and len(self.unknown_fields) < _MAX_NAMES:
                    self.unknown_fields[bounded_name(str(name))] += 1
        self._add_hashes(event.get("block_hashes"))

    def _add_array(self, event: Sequence[Any]) -> None:
        self.arrays += 1
        if event and event[0] == "BlockStored":
            self.longest_array = max(self.longest_array, len(event))
        self._add_hashes(event[1] if len(event) > 1 else None)

    def _add_hashes(self, hashes: object) -> None:
        for value in hashes if isinstance(hashes, list) else ():
            if isinstance(value, bytes):
                self.hash_kinds[f"{len(value)} bytes"] += 1
            elif isinstance(value, int) and not isinstance(value, bool):
                self.hash_kinds["signed" if value < 0 else "unsigned"] += 1
