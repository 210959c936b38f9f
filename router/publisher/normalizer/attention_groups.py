"""The selection of an engine's blocks that count, and the tier of each."""

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
    """Return the tier that an engine's medium stands for.

    Returns None for unknown media, and for blocks that the engine can reach but that are stored
    elsewhere.
    """
    if locality not in (None, "LOCAL"):
        return None
    tier = _TIERS.get(medium)
    if tier is None and medium is not None:
        return _TIERS.get(medium.upper())
    return tier


class AttentionGroups:
    """The groups of a hybrid model's layers that are credited: those of full attention.

    A window or a state contains no information about a whole prefix. Stores contain the kind of
    their group, removals do not, so the kind is remembered. Without a kind, group 0 counts as
    credited.
    """

    __slots__ = ("_kinds",)

    def __init__(self) -> None:
        self._kinds: dict[int, bool] = {}

    def note(self, group: int, kind: str | None) -> bool:
        """Record the group of a store. Returns whether the group is credited."""
        is_credited = kind in FULL_ATTENTION if kind is not None else self.credits(group)
        if group in self._kinds or len(self._kinds) < _MAX_GROUPS:
            self._kinds[group] = is_credited
        return is_credited

    def credits(self, group: int) -> bool:
        """Return whether a group is credited, as far as is known."""
        return self._kinds.get(group, group == 0)

    def listed(self) -> dict[int, bool]:
        """Return the known groups, each with whether it is credited."""
        return self._kinds

    def load(self, kinds: dict[int, bool]) -> None:
        """Replace all groups by a list."""
        self._kinds = kinds
