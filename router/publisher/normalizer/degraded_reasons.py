"""The reasons why the contents of a journal may be wrong or incomplete."""

from math import inf

from router.protocol.values import Doubt, Tier
from router.publisher.journal.consolidator import SourceJournal
from router.publisher.normalizer.engine_map import EngineMap
from router.publisher.normalizer.settings import EngineSettings

# Plain integers: combining flags of an enum takes a microsecond.
_ORPHANS = int(Doubt.ORPHANS)
_HYBRID = int(Doubt.HYBRID)
_COPIES = int(Doubt.COPIES)
_LOWER_TIERS = int(Doubt.LOWER_TIERS)
_UNCOUNTED = int(Doubt.UNCOUNTED)
_UNKNOWN_FIELDS = int(Doubt.UNKNOWN_FIELDS)

_LOWER = tuple(tier for tier in Tier if tier)


class DegradedReasons:
    """The doubts of one rank, and the journal they are published in.

    The doubt of orphans lasts while there are any, that of lower tiers until these are empty, the
    others until the engine clears everything. `is_hybrid`: the model is hybrid, which readers that
    know layouts take from the layout instead; `has_full_only`: it is, and no layout is published
    in all of this life; `units_per_block`: see `Groups.units`.
    `may_have_lower_tiers`: True if lower tiers may hold blocks, published or not. `unknown_field`:
    the sentence about the first unknown field since the doubt of these began; None without it.
    """

    __slots__ = (
        "_doubt_after_s",
        "_journal",
        "_orphans_since_s",
        "_said",
        "_settings",
        "_uncounted_blocks",
        "has_full_only",
        "is_hybrid",
        "kept",
        "may_have_lower_tiers",
        "units_per_block",
        "unknown_field",
    )

    def __init__(
        self, journal: SourceJournal, settings: EngineSettings, doubt_after_s: float
    ) -> None:
        self._journal = journal
        self._doubt_after_s = doubt_after_s
        self._said = 0
        self.begin(settings)

    def begin(self, settings: EngineSettings) -> None:
        """Start a new life, without doubts."""
        self.kept = 0
        self.is_hybrid = False
        self.units_per_block = 1
        self.unknown_field: str | None = None
        self.has_full_only = settings.has_full_only
        self._settings = settings
        self._uncounted_blocks = 0
        self._orphans_since_s: float | None = None
        self.may_have_lower_tiers = bool(settings.has_lower_tiers)

    def lose(self) -> None:
        """Record that events are lost for good; lower tiers may hold unknown blocks."""
        self._uncounted_blocks = 0
        self.kept = int(Doubt.EVENTS_LOST)
        self.unknown_field = None
        self.may_have_lower_tiers = self._settings.has_lower_tiers is not False

    def drop_orphans(self) -> None:
        """Record that orphans will never be named: all are a doubt at once, until none is left."""
        self._orphans_since_s = -inf

    def add(self, doubt: Doubt) -> None:
        """Add a doubt."""
        self.kept |= int(doubt)

    def note_unknown_field(self, sentence: str) -> None:
        """Add the doubt of unknown fields. Only the first sentence is kept."""
        self.kept |= _UNKNOWN_FIELDS
        self.unknown_field = self.unknown_field or sentence

    def clear(self, engine_map: EngineMap, *, is_complete: bool) -> None:
        """Drop the doubts that end when the engine clears its device, or everything."""
        if is_complete:
            self.kept = 0
            self.unknown_field = None
            self._uncounted_blocks = engine_map.uncounted_blocks
        elif _holds_lower(engine_map):
            self.kept |= _LOWER_TIERS
        else:
            self.kept &= ~_COPIES

    def publish(self, engine_map: EngineMap, now_s: float) -> None:
        """Publish the current doubts to the journal. O(1)."""
        pool_blocks = self._settings.num_gpu_blocks
        device_blocks = engine_map.copies(Tier.DEVICE) // self.units_per_block
        has_too_many = pool_blocks is not None and device_blocks > pool_blocks
        if has_too_many or engine_map.is_saturated:
            self.kept |= _COPIES
        is_repeated = engine_map.uncounted_blocks > self._uncounted_blocks
        if is_repeated and self._settings.report_mode == "full":
            self.kept |= _UNCOUNTED
        if self.kept & _LOWER_TIERS and not _holds_lower(engine_map):
            self.kept &= ~_LOWER_TIERS
        doubts = self.kept | self._orphans(engine_map, now_s)
        if self.is_hybrid or self.has_full_only:
            doubts |= _HYBRID
        if doubts != self._said:
            self._said = doubts
            self._journal.set_doubts(doubts)

    def check_invariants(self, engine_map: EngineMap) -> None:
        """Assert that the journal contains the current doubts."""
        orphans = _ORPHANS if engine_map.orphan_blocks else 0
        assert self._journal.state.doubts == self._said
        doubts = self._said & ~_HYBRID
        assert doubts == self.kept | orphans or (self._doubt_after_s and doubts == self.kept)

    def _orphans(self, engine_map: EngineMap, now_s: float) -> int:
        if not engine_map.orphan_blocks:
            self._orphans_since_s = None
            return 0
        if self._orphans_since_s is None:
            self._orphans_since_s = now_s
        return _ORPHANS if now_s - self._orphans_since_s >= self._doubt_after_s else 0


def _holds_lower(engine_map: EngineMap) -> bool:
    return any(engine_map.copies(tier) for tier in _LOWER)
