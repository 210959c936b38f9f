"""Who else has the leading blocks of a prompt."""

from collections.abc import Sequence

from msgspec import Struct

from router.protocol.values import Rank


class PeerSource(Struct, frozen=True):
    """A rank of another worker, or of this one, that has the first `blocks` of a prompt.

    `addresses`: where it gives them, `tcp://host:port` or, on its host, `unix:///path`.
    """

    rank: Rank
    addresses: Sequence[str]
    blocks: int
