"""The levels of the cache, under the names that operators know them by."""

from enum import StrEnum

from router.protocol.values import Tier


class CacheLevel(StrEnum):
    """Where blocks lie, fastest first."""

    G1 = "G1"
    """Memory of the device."""
    G2 = "G2"
    """Memory of the host."""
    G3 = "G3"
    """Disk."""
    G4 = "G4"
    """A store that workers share."""

    @property
    def tier(self) -> Tier:
        """As the bus calls it."""
        return Tier(int(self[1]) - 1)


def level_of(tier: Tier) -> CacheLevel:
    """As operators call it."""
    return CacheLevel(f"G{tier + 1}")
