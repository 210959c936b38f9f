"""Event streams in both encodings, and the reader that follows ours."""

from collections.abc import Sequence
from itertools import chain as concatenated
from typing import NamedTuple

from index_worlds import Path, World, random_path
from peer import removed_event, stored_event

from router.indexer.trusted_index import TrustedIndex
from router.protocol.events import (
    Checkpoint,
    Event,
    EventBatch,
    Removed,
    Stored,
    decode_log_message,
    encode_log_message,
    pack_batch,
)
from router.protocol.values import (
    SCHEME,
    HashArray,
    HeldState,
    Identity,
    Rank,
    Scope,
    Tier,
    pack_hashes,
)
from router.sequence.hashing._digest import digest

SCOPE, IDENTITY, INCARNATION = Scope(), Identity(SCHEME, 16), 1
PATH_BLOCKS = 512


class Step(NamedTuple):
    """One message of ours, and the same events as the peer takes them, each with its worker."""

    message: bytes
    events: tuple[tuple[int, bytes], ...]


class _Change(NamedTuple):
    event: Event
    hashes: HashArray
    sign: int
    peer_event: bytes


class Writer:
    """What one rank has to say, with the counts and digests that go with it.

    Blocks are new when stored and leave leaf first, so there are never holes.
    """

    def __init__(self, worker_id: int) -> None:
        self.rank = Rank(worker_id, 0)
        self._event_id = 0
        self._count = 0
        self._digest = 0

    def checkpoint(self) -> bytes:
        """The log's first message: nothing is held."""
        return encode_log_message(
            Checkpoint(*self.rank_head, event_id=0, part=0, parts=1, blocks=(), state=HeldState())
        )

    def stored(self, path: Path, event_blocks: int, message_events: int = 1) -> list[Step]:
        """A path's blocks from its root."""
        changes = []
        for start in range(0, len(path.sequence_hashes), event_blocks):
            hashes = path.sequence_hashes[start : start + event_blocks]
            local_hashes = path.local_hashes[start : start + event_blocks].tolist()
            parent = int(path.sequence_hashes[start - 1]) if start else None
            peer_event = stored_event(self._event_id, parent, local_hashes, hashes.tolist())
            event = Stored(Tier.DEVICE, pack_hashes(hashes))
            changes.append(_Change(event, hashes, +1, peer_event))
        return self._steps(changes, message_events)

    def removed(self, path: Path, event_blocks: int, message_events: int = 1) -> list[Step]:
        """A path's blocks from its leaf."""
        leaf_first = path.sequence_hashes[::-1].copy()
        changes = []
        for start in range(0, len(leaf_first), event_blocks):
            hashes = leaf_first[start : start + event_blocks]
            peer_event = removed_event(self._event_id, hashes.tolist())
            changes.append(
                _Change(Removed(Tier.DEVICE, pack_hashes(hashes)), hashes, -1, peer_event)
            )
        return self._steps(changes, message_events)

    @property
    def rank_head(self) -> tuple[int, int, int, Identity]:
        return self.rank.worker_id, self.rank.dp_rank, INCARNATION, IDENTITY

    def _steps(self, changes: list[_Change], message_events: int) -> list[Step]:
        return [
            self._step(changes[start : start + message_events])
            for start in range(0, len(changes), message_events)
        ]

    def _step(self, changes: list[_Change]) -> Step:
        for change in changes:
            self._count += change.sign * len(change.hashes)
            self._digest ^= digest(change.hashes)
        event_ids = self._event_id + 1, self._event_id + len(changes)
        self._event_id += len(changes)
        state = HeldState(counts=(self._count, 0, 0, 0), digests=(self._digest, 0, 0, 0))
        packed = pack_batch(state, [change.event for change in changes])
        message = encode_log_message(EventBatch(*self.rank_head, *event_ids, packed))
        return Step(message, tuple((self.rank.worker_id, c.peer_event) for c in changes))


class Reader:
    """Our index, which knows the writers' ranks and follows their messages into a world's tree."""

    def __init__(self, world: World, writers: Sequence[Writer]) -> None:
        self._index = TrustedIndex(lambda: world.ours)
        self._writers = writers
        self._checkpoints = [Writer(writer.rank.worker_id).checkpoint() for writer in writers]
        self.restart()

    def restart(self) -> None:
        """Every log begins again, with nothing held."""
        for writer, checkpoint in zip(self._writers, self._checkpoints, strict=True):
            self._index.add_rank(writer.rank, SCOPE, IDENTITY, 0.0)
            self.read(checkpoint)

    def read(self, message: bytes) -> None:
        """From bytes to visible."""
        self._index.apply(decode_log_message(message), 0.0)

    def require_exact(self) -> None:
        """Raise RuntimeError if any rank's counts and digests were ever off."""
        right = {state.rank for state in self._index.rank_states()}
        wrong = [writer.rank for writer in self._writers if writer.rank not in right]
        if wrong:
            raise RuntimeError(f"{len(wrong)} ranks do not add up, {wrong[0]} among them")


class Stream:
    """Ranks that each store paths of their own; events of all ranks in turn."""

    def __init__(self, world: World, worker_ids: Sequence[int], blocks: int) -> None:
        """Make about `blocks` blocks in all, in paths of 512 or, where ranks are many, less."""
        self.writers = [Writer(worker_id) for worker_id in worker_ids]
        length = min(PATH_BLOCKS, blocks // len(worker_ids))
        paths = blocks // length // len(worker_ids)
        self.paths = [
            [random_path(world.random, length) for _ in range(paths)] for _ in self.writers
        ]

    def stored(self, event_blocks: int, message_events: int = 1) -> list[Step]:
        """Store all paths, `event_blocks` blocks an event, `message_events` events a message."""
        return _in_turn(
            [
                list(
                    concatenated.from_iterable(
                        w.stored(path, event_blocks, message_events) for path in own
                    )
                )
                for w, own in zip(self.writers, self.paths, strict=True)
            ]
        )

    def removed(self, event_blocks: int) -> list[Step]:
        """Remove all paths, in events of `event_blocks` blocks."""
        return _in_turn(
            [
                list(concatenated.from_iterable(w.removed(path, event_blocks) for path in own))
                for w, own in zip(self.writers, self.paths, strict=True)
            ]
        )


def _in_turn(by_rank: list[list[Step]]) -> list[Step]:
    return list(concatenated.from_iterable(zip(*by_rank, strict=True)))
