"""Which of an engine's blocks count, and in which tier."""

from router.protocol.values import Tier

FULL_ATTENTION = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
_MAX_GROUPS = 256

_TIERS: dict[str | None, Tier] = {
    None: Tier.DEVICE,
    "": Tier.DEVICE,
    "GPU": Tier.DEVICE,
    "DEVICE": Tier.DEVICE,
    "CPU": Tier.HOST,
    "CPU_PINNED": Tier.HOST,
    "CPU_TIER1": Tier.HOST,
    "CPU_TIER2": Tier.DISK,
    "DISK": Tier.DISK,
    "NVME": Tier.DISK,
    "STORAGE": Tier.DISK,
    "EXTERNAL": Tier.REMOTE,
    "NETWORK": Tier.REMOTE,
    "REMOTE": Tier.REMOTE,
    "SHARED": Tier.REMOTE,
}


def tier_of(medium: str | None, locality: str | None) -> Tier | None:
    """The tier that an engine's words mean; None for words that we do not know, and for blocks that
    the engine can reach but that lie elsewhere.
    """
    if locality not in (None, "LOCAL"):
        return None
    tier = _TIERS.get(medium)
    if tier is None and medium is not None:
        return _TIERS.get(medium.upper())
    return tier


class Groups:
    """Which groups of a hybrid model's layers are credited: those of full attention.

    A window or a state says nothing of a whole prefix. Stores say the kind of their group,
    removals do not, so it is remembered. Where no kind is said, group 0 is taken to be credited.
    """

    __slots__ = ("_kinds",)

    def __init__(self) -> None:
        self._kinds: dict[int, bool] = {}

    def note(self, group: int, kind: str | None) -> bool:
        """A store of this group; is it credited?"""
        is_credited = kind in FULL_ATTENTION if kind is not None else self.credits(group)
        if group in self._kinds or len(self._kinds) < _MAX_GROUPS:
            self._kinds[group] = is_credited
        return is_credited

    def credits(self, group: int) -> bool:
        """Is a group credited, as far as is known?"""
        return self._kinds.get(group, group == 0)

    def listed(self) -> dict[int, bool]:
        """What is known of each group."""
        return self._kinds

    def load(self, kinds: dict[int, bool]) -> None:
        """Replace all by what was listed."""
        self._kinds = kinds
