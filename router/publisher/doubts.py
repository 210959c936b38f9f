"""Why a normaliser cannot vouch for what its journal holds."""

from router.protocol.values import U64_MAX, Doubt, Tier
from router.publisher.engine_map import EngineMap
from router.publisher.normalizer_settings import EngineSettings
from router.publisher.source_journal import SourceJournal

# Plain integers: a flag of an enum takes a microsecond to combine.
_ORPHANS = int(Doubt.ORPHANS)
_HYBRID = int(Doubt.HYBRID)
_COPIES = int(Doubt.COPIES)
_LOWER_TIERS = int(Doubt.LOWER_TIERS)
_UNCOUNTED = int(Doubt.UNCOUNTED)

_LOWER = tuple(tier for tier in Tier if tier)


class Doubts:
    """Doubts of one rank, and the journal they are said in.

    Orphans are doubted while there are any, lower tiers until they are empty, the rest until the
    engine clears all it has, and a hybrid model for good. `may_have_lower_tiers`: could there be
    blocks in lower tiers that we have not been told of, or have been?
    """

    __slots__ = (
        "_has_lower_tiers",
        "_journal",
        "_most_copies",
        "_said",
        "_uncounted_blocks",
        "kept",
        "may_have_lower_tiers",
    )

    def __init__(self, journal: SourceJournal, settings: EngineSettings) -> None:
        blocks = settings.num_gpu_blocks
        self._journal = journal
        self._most_copies = U64_MAX if blocks is None else blocks
        self._has_lower_tiers = settings.has_lower_tiers
        self._said = 0
        self.begin()

    def begin(self) -> None:
        """A new life: nothing is doubted."""
        self.kept = 0
        self._uncounted_blocks = 0
        self.may_have_lower_tiers = bool(self._has_lower_tiers)

    def lose(self) -> None:
        """Events are lost for good, and with them what lower tiers may hold."""
        self._uncounted_blocks = 0
        self.kept = self.kept & _HYBRID | int(Doubt.EVENTS_LOST)
        self.may_have_lower_tiers = self._has_lower_tiers is not False

    def add(self, doubt: Doubt) -> None:
        """From now on there is this doubt."""
        self.kept |= int(doubt)

    def has(self, doubt: Doubt) -> bool:
        """Is there this doubt, other than of orphans?"""
        return bool(self.kept & int(doubt))

    def clear(self, engine_map: EngineMap, *, is_complete: bool) -> None:
        """The engine has cleared its device, or all it has."""
        if is_complete:
            self.kept &= _HYBRID
            self._uncounted_blocks = engine_map.uncounted_blocks
        elif _holds_lower(engine_map):
            self.kept |= _LOWER_TIERS
        else:
            self.kept &= ~_COPIES

    def say(self, engine_map: EngineMap) -> None:
        """Tell the journal what is doubted now. O(1)."""
        if engine_map.copies(Tier.DEVICE) > self._most_copies or engine_map.is_saturated:
            self.kept |= _COPIES
        if engine_map.uncounted_blocks > self._uncounted_blocks:
            self.kept |= _UNCOUNTED
        if self.kept & _LOWER_TIERS and not _holds_lower(engine_map):
            self.kept &= ~_LOWER_TIERS
        doubts = self.kept | (_ORPHANS if engine_map.orphan_blocks else 0)
        if doubts != self._said:
            self._said = doubts
            self._journal.set_doubts(doubts)

    def check_invariants(self, engine_map: EngineMap) -> None:
        """Assert that the journal says what is doubted."""
        orphans = _ORPHANS if engine_map.orphan_blocks else 0
        assert self._journal.state.doubts == self.kept | orphans


def _holds_lower(engine_map: EngineMap) -> bool:
    return any(engine_map.copies(tier) for tier in _LOWER)
