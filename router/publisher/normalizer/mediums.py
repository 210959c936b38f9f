"""The tier of each medium of an engine's blocks."""

from router.protocol.values import Tier

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
