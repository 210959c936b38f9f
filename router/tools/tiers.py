"""What people call the tiers, which dumps name otherwise."""

from collections.abc import Mapping

from router.protocol.dumps import TIER_NAMES, TierName

TIER_WORDS: Mapping[TierName, str] = dict(
    zip(TIER_NAMES, ("device", "host", "disk", "remote"), strict=True)
)
