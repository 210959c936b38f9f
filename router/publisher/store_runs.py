"""Which stored events of a batch can be done together.

Engines tell of each request by itself, a few blocks at a time: a call for every event would take
several times as long as its blocks do.
"""

from collections.abc import Iterator, Sequence
from typing import TypeAlias

from router.publisher.engine_events import EngineCleared, EngineEvent, EngineRemoved, EngineStored

StoreRun: TypeAlias = list[EngineStored]
"""Consecutive stored events that differ only in their blocks, tokens and parents, have equally many
tokens more than their blocks need, and say nothing else; or any single one.
"""


def runs_of(events: Sequence[EngineEvent]) -> Iterator[StoreRun | EngineRemoved | EngineCleared]:
    """The same events in the same order, stored ones in runs."""
    run: StoreRun = []
    kind: object = None
    for event in events:
        if not isinstance(event, EngineStored):
            if run:
                yield run
                run = []
            yield event
            continue
        own_kind = _kind(event)
        if run and (own_kind is None or own_kind != kind):
            yield run
            run = []
        run.append(event)
        kind = own_kind
    if run:
        yield run


def block_count(run: StoreRun) -> int:
    """How many blocks a run's events have."""
    return sum([len(event.block_hashes) for event in run])


def _kind(event: EngineStored) -> tuple[object, ...] | None:
    """What events of one run have in common; None: it is one by itself."""
    blocks = len(event.block_hashes)
    if event.lora_name or event.cache_salt or event.lora_id or event.extra_keys or not blocks:
        return None
    return (
        event.medium,
        event.locality,
        event.group,
        event.spec_kind,
        event.block_size,
        event.is_eagle,
        len(event.tokens) - blocks * event.block_size,
    )
