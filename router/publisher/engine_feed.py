"""From the order of one engine's batches to one rank's journal.

steps of EngineLog ─▶ EngineFeed ─decode─▶ Normalizer ─▶ EventJournal
  Apply                 batch                apply
  NewLife                                    reset          new_life
  Lost                                       events_lost    require_checkpoint
"""

from collections.abc import Callable, Iterator, Sequence

from router.errors import WireError
from router.publisher.complaints import Complaints
from router.publisher.decode_room import DecodeRoom
from router.publisher.engine_batch import EngineBatch
from router.publisher.engine_events import decode_engine_batch
from router.publisher.engine_steps import Apply, ApplyDecoded, Lost, NewLife, Step
from router.publisher.event_slices import SLICE_BLOCKS
from router.publisher.normalizer import Normalizer
from router.publisher.normalizer_settings import NormalizerStats
from router.publisher.normalizer_state import SavedParts
from router.publisher.source_journal import SourceJournal

STATE_BATCHES = 2_000
"""After so many a state is worth keeping: engines can replay several times as many."""

PAUSE_BLOCKS = 2 * SLICE_BLOCKS
"""Carried out without a pause, or as many and a slice."""

STEP_BLOCKS = 16
"""A step takes as long as so many blocks, however few it is about."""


class FeedCounters:
    """What became of batches since the start of the process."""

    __slots__ = ("applied", "dropped_events", "foreign", "lost", "new_lives", "unreadable")

    def __init__(self) -> None:
        self.applied = 0
        self.unreadable = 0
        self.foreign = 0
        self.dropped_events = 0
        self.new_lives = 0
        self.lost = 0


class EngineFeed:
    """Feeder of one rank; nobody else writes to its normaliser and journal.

    A batch that another rank published is dropped: to credit it would invent a rank. `problem`:
    what was wrong with the last bad batch of this life.
    """

    __slots__ = (
        "_complaints",
        "_dp_rank",
        "_journal",
        "_normalizer",
        "_room",
        "_unsaved",
        "counters",
        "problem",
    )

    def __init__(self, journal: SourceJournal, normalizer: Normalizer, dp_rank: int) -> None:
        self._journal = journal
        self._normalizer = normalizer
        self._dp_rank = dp_rank
        self._complaints = Complaints()
        self._room = DecodeRoom()
        self._unsaved = 0
        self.counters = FeedCounters()
        self.problem: str | None = None

    @property
    def is_state_due(self) -> bool:
        """Has so much happened since the last `save` that the state should be kept?"""
        return self._unsaved >= STATE_BATCHES

    @property
    def normalizer_stats(self) -> NormalizerStats:
        """What became of events and blocks. O(1)."""
        return self._normalizer.stats

    def take(self, steps: Sequence[Step], now_s: float) -> None:
        """Carry out steps, in order; replays are not its business. O(blocks)."""
        for _ in self.slices(steps, lambda: now_s):
            pass

    def slices(self, steps: Sequence[Step], clock: Callable[[], float]) -> Iterator[int]:
        """The same in slices, to be gone through to their end; says how many steps each has ended,
        which may be none.
        """
        blocks = ended = 0
        for step in steps:
            for more in self._carry_out(step, clock()):
                if blocks >= PAUSE_BLOCKS:
                    yield ended
                    blocks = ended = 0
                blocks += more
            blocks += STEP_BLOCKS
            ended += 1
            if blocks >= PAUSE_BLOCKS:
                yield ended
                blocks = ended = 0
        if ended:
            yield ended

    def _carry_out(self, step: Step, now_s: float) -> Iterator[int]:
        """Says before each part of a step how many blocks it is about."""
        if isinstance(step, Apply):
            return self._apply(step.sequence, self._decoded(step), now_s)
        if isinstance(step, ApplyDecoded):
            return self._apply(step.sequence, step.batch, now_s)
        if isinstance(step, NewLife):
            self._begin_life(step)
        elif isinstance(step, Lost):
            self._lose(step)
        return iter(())

    def tick(self, now_s: float) -> None:
        """Time passes."""
        self._normalizer.tick(now_s)

    def take_complaints(self, now_s: float) -> Sequence[str]:
        """Sentences to warn with, at most a few each 5 s."""
        return self._complaints.take(now_s)

    def save(self) -> SavedParts:
        """What is known after the steps so far, see `Normalizer.save`. O(blocks known)."""
        self._unsaved = 0
        return self._normalizer.save()

    def _apply(self, sequence: int, batch: EngineBatch, now_s: float) -> Iterator[int]:
        self._unsaved += 1
        if batch.dp_rank not in (None, self._dp_rank):
            self.counters.foreign += 1
            self._refuse_rank(batch.dp_rank)
            return
        self.counters.applied += 1
        yield from self._normalizer.apply_slices(batch, now_s)
        self._complain_of(sequence, batch)

    def _refuse_rank(self, dp_rank: int | None) -> None:
        sentence = (
            f"batches of rank {dp_rank} come where rank {self._dp_rank} is registered, and are "
            f"dropped: register this endpoint as rank {dp_rank}"
        )
        if sentence != self.problem:
            self._complain(sentence)

    def _decoded(self, step: Apply) -> EngineBatch:
        """A batch that is none becomes an empty one with something malformed in it."""
        try:
            return decode_engine_batch(step.payload, room=self._room)
        except WireError as error:
            self.counters.unreadable += 1
            return EngineBatch(None, [], [], [error.reason])

    def _complain(self, sentence: str) -> None:
        self.problem = sentence
        self._complaints.add(sentence)

    def _complain_of(self, sequence: int, batch: EngineBatch) -> None:
        for kind in batch.unknown:
            self._complain(f"batch {sequence}: events of type {kind!r} are dropped")
        for sentence in batch.malformed:
            self._complain(f"batch {sequence}: {sentence}")
        self.counters.dropped_events += len(batch.unknown) + len(batch.malformed)
        for sentence in self._normalizer.take_complaints():
            self._complain(f"batch {sequence}: {sentence}")

    def _begin_life(self, step: NewLife) -> None:
        self.counters.new_lives += 1
        self.problem = None
        self._complaints.add(f"the engine began a new life: {step.reason}")
        self._journal.new_life(self._journal.incarnation + 1)
        self._normalizer.reset()

    def _lose(self, step: Lost) -> None:
        self.counters.lost += 1
        last = "?" if step.last is None else step.last
        self._complain(f"batches {step.first} to {last} are lost: {step.reason}")
        self._normalizer.events_lost()
        # Doubts alone are no event, and where nothing was held there is no other.
        self._journal.require_checkpoint()
