"""The feed of one rank's journal from the ordered batches of its engine.

steps of EngineLog ─▶ EngineFeed ─decode─▶ Normalizer ─▶ EventJournal
  Apply                 batch                apply
  NewLife                                    reset          new_life
  Lost                                       events_lost    require_checkpoint
"""

from collections.abc import Callable, Iterator, Sequence

from router.errors import WireError
from router.publisher.batch_order.steps import Apply, ApplyDecoded, Lost, NewLife, Step
from router.publisher.engine_events.batch import EngineBatch
from router.publisher.engine_events.decoder import ScratchBuffer, decode_engine_batch
from router.publisher.engine_events.slices import SLICE_BLOCKS
from router.publisher.feed.log_limiter import LogLimiter
from router.publisher.journal.consolidator import SourceJournal
from router.publisher.normalizer.normalizer import Normalizer
from router.publisher.normalizer.settings import NormalizerStats
from router.publisher.normalizer.state import SavedParts

STATE_BATCHES = 2_000
"""The number of batches after which the state should be saved; engines can replay several times
as many."""

PAUSE_BLOCKS = 2 * SLICE_BLOCKS
"""The number of blocks after which a pause is due; a slice may exceed it."""

STEP_BLOCKS = 16
"""The cost of a step in blocks, in addition to its own blocks."""


class FeedCounters:
    """Counters of batches since the start of the process."""

    __slots__ = ("applied", "dropped_events", "foreign", "lost", "new_lives", "unreadable")

    def __init__(self) -> None:
        self.applied = 0
        self.unreadable = 0
        self.foreign = 0
        self.dropped_events = 0
        self.new_lives = 0
        self.lost = 0


class EngineFeed:
    """A feeder of one rank, the only writer of its normaliser and journal.

    Batches that another rank published are dropped: crediting them would invent a rank.
    """

    __slots__ = (
        "_complaints",
        "_dp_rank",
        "_journal",
        "_normalizer",
        "_problem",
        "_room",
        "_unknown_field",
        "_unsaved",
        "counters",
    )

    def __init__(self, journal: SourceJournal, normalizer: Normalizer, dp_rank: int) -> None:
        self._journal = journal
        self._normalizer = normalizer
        self._dp_rank = dp_rank
        self._complaints = LogLimiter()
        self._room = ScratchBuffer()
        self._unsaved = 0
        self.counters = FeedCounters()
        self._problem: str | None = None
        self._unknown_field: str | None = None

    @property
    def problem(self) -> str | None:
        """The error of the last bad batch of this life, and the doubt about unknown fields."""
        found = [each for each in (self._problem, self._normalizer.unknown_field) if each]
        return "; ".join(found) or None

    @property
    def is_state_due(self) -> bool:
        """True if enough batches were applied since the last `save` to save the state again."""
        return self._unsaved >= STATE_BATCHES

    @property
    def normalizer_stats(self) -> NormalizerStats:
        """The counters of events and blocks. O(1)."""
        return self._normalizer.stats

    def take(self, steps: Sequence[Step], now_s: float) -> None:
        """Apply steps, in order; replays are ignored. O(blocks)."""
        for _ in self.slices(steps, lambda: now_s):
            pass

    def slices(self, steps: Sequence[Step], clock: Callable[[], float]) -> Iterator[int]:
        """Apply steps in slices; the iterator must be exhausted.

        Yields the number of steps that each slice has completed, which may be 0.
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
        """Apply a step in parts; yields the number of blocks of each part before applying it."""
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
        """Process the passing of time."""
        self._normalizer.tick(now_s)

    def take_complaints(self, now_s: float) -> Sequence[str]:
        """Return the warnings to log, at most a few each 5 s."""
        return self._complaints.take(now_s)

    def save(self) -> SavedParts:
        """Return the state after the steps so far, see `Normalizer.save`. O(blocks known)."""
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
            f"batches of rank {dp_rank} arrive where rank {self._dp_rank} is registered, and are "
            f"dropped: register this endpoint as rank {dp_rank}"
        )
        if sentence != self._problem:
            self._complain(sentence)

    def _decoded(self, step: Apply) -> EngineBatch:
        """Return the decoded batch, or an empty one with an error if it is unreadable."""
        try:
            return decode_engine_batch(step.payload, room=self._room)
        except WireError as error:
            self.counters.unreadable += 1
            return EngineBatch(None, [], [], [error.reason])

    def _complain(self, sentence: str, sequence: int | None = None) -> None:
        """Note what is wrong; in the log with the batch, which differs each time."""
        self._problem = sentence
        self._complaints.add(sentence if sequence is None else f"batch {sequence}: {sentence}")

    def _complain_of(self, sequence: int, batch: EngineBatch) -> None:
        for kind in batch.unknown:
            self._complain(f"events of type {kind!r} are dropped", sequence)
        for sentence in batch.malformed:
            self._complain(sentence, sequence)
        self.counters.dropped_events += len(batch.unknown) + len(batch.malformed)
        for sentence in self._normalizer.take_complaints():
            self._complain(sentence, sequence)
        if batch.unknown_field is not None:
            self._complain_of_field(sequence)

    def _complain_of_field(self, sequence: int) -> None:
        """Log an unknown field once, although all batches of an engine may have it."""
        sentence = self._normalizer.unknown_field
        if sentence is not None and sentence != self._unknown_field:
            self._unknown_field = sentence
            self._complaints.add(f"batch {sequence}: {sentence}")

    def _begin_life(self, step: NewLife) -> None:
        self.counters.new_lives += 1
        self._problem = self._unknown_field = None
        self._complaints.add(f"the engine began a new life: {step.reason}")
        self._journal.new_life(self._journal.incarnation + 1)
        self._normalizer.reset()

    def _lose(self, step: Lost) -> None:
        self.counters.lost += 1
        last = "?" if step.last is None else step.last
        self._complain(f"batches {step.first} to {last} are lost: {step.reason}")
        self._normalizer.events_lost()
        # Doubts alone cause no event, and without held blocks there is no other one.
        self._journal.require_checkpoint()
