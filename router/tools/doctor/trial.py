"""A router's own normaliser, fed with the received events: its blocks and its doubts."""

from math import gcd

from msgspec import Struct

from router.protocol.hybrid import HybridState
from router.protocol.values import SCHEME, Doubt, HeldState, Identity, Rank
from router.publisher.engine_events.batch import EngineBatch
from router.publisher.journal.journal import EventJournal
from router.publisher.normalizer.normalizer import Normalizer
from router.publisher.normalizer.settings import EngineSettings, NormalizerStats
from router.tools.doctor.event_totals import stored_in

_NOW_S = 0.0
"""The fixed time of the trial: orphans never time out."""

_MAX_COMPLAINTS = 3


class ObservedTrial(Struct, frozen=True):
    """The result of the trial."""

    block_size: int
    is_eagle: bool
    held: HeldState
    stats: NormalizerStats
    complaints: list[str]
    hybrid: HybridState | None = None

    @property
    def extra_copies(self) -> int:
        """The copies on the device beyond one of each block."""
        return self.stats.device_copies - self.held.counts[0]

    def doubts(self, doubt: Doubt) -> bool:
        """Return whether the state has this doubt."""
        return bool(self.held.doubts & doubt)


class Trial:
    """The normaliser of the first rank received.

    It starts with the first block of a known size; `block_size` takes precedence if given.
    """

    __slots__ = (
        "_block_size",
        "_complaints",
        "_dp_rank",
        "_has_lost",
        "_is_eagle",
        "_journal",
        "_next",
        "_normalizer",
        "_settings",
    )

    def __init__(self, block_size: int | None, num_gpu_blocks: int | None) -> None:
        self._block_size = block_size
        self._is_eagle = False
        self._settings = EngineSettings(num_gpu_blocks=num_gpu_blocks)
        self._dp_rank: int | None = None
        self._next = 0
        self._has_lost = False
        self._complaints: list[str] = []
        self._journal: EventJournal | None = None
        self._normalizer: Normalizer | None = None

    def take(self, sequence: int, batch: EngineBatch) -> None:
        """Apply a batch; one out of order is applied as after a loss, as in a router."""
        if batch.dp_rank is not None and self._dp_rank is None:
            self._dp_rank = batch.dp_rank
        if batch.dp_rank not in (None, self._dp_rank):
            return
        self._has_lost |= sequence != self._next
        self._next = sequence + 1
        normalizer = self._normalizer or self._begun(batch)
        if normalizer is None:
            return
        if self._has_lost:
            normalizer.events_lost()
            self._has_lost = False
        normalizer.apply(batch, _NOW_S)
        self._complaints.extend(normalizer.take_complaints())
        del self._complaints[_MAX_COMPLAINTS:]

    def seen(self) -> ObservedTrial | None:
        """Return the current result. Returns None if no block was received."""
        if self._normalizer is None or self._journal is None or self._block_size is None:
            return None
        return ObservedTrial(
            self._block_size,
            self._is_eagle,
            self._journal.state,
            self._normalizer.stats,
            self._complaints,
            self._journal.hybrid,
        )

    def _begun(self, batch: EngineBatch) -> Normalizer | None:
        """Create the normaliser at the first block; batches before it change nothing.

        The groups of a hybrid model may have blocks of several sizes, of which hashes divide each.
        """
        events = [event for event in stored_in(batch) if event.block_size]
        if not events:
            return None
        self._is_eagle = events[0].is_eagle
        self._block_size = self._block_size or gcd(*(event.block_size for event in events))
        identity = Identity(SCHEME, self._block_size, self._is_eagle)
        self._journal = EventJournal(Rank(0, 0), 1, identity)
        self._normalizer = Normalizer(self._journal, identity, settings=self._settings)
        return self._normalizer
