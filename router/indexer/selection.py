"""Which index the settings ask for."""

from msgspec import Struct

from router.indexer.base import Indexer, IndexMode
from router.indexer.concurrent import ConcurrentIndex
from router.indexer.none import NoneIndex
from router.indexer.radix_tree import MULTIPLIER, RadixTree


class IndexSettings(Struct, frozen=True):
    """What decides how held blocks are known.

    `event_threads`: shards that are changed in parallel; they share `max_blocks` in equal parts.
    `multiplier` is that of the radix trees.
    """

    overlap_score_weight: float
    use_kv_events: bool
    event_threads: int
    max_blocks: int
    multiplier: int = MULTIPLIER


def index_mode(settings: IndexSettings) -> IndexMode:
    """Where the knowledge of caches is to come from."""
    if not settings.overlap_score_weight > 0:
        return IndexMode.NONE
    return IndexMode.EVENTS if settings.use_kv_events else IndexMode.APPROXIMATE


def make_indexer(settings: IndexSettings) -> Indexer:
    """The index that events are applied to; one that keeps nothing where they do not count."""
    mode = index_mode(settings)
    if mode is not IndexMode.EVENTS:
        return NoneIndex(refuses_dumps=mode is IndexMode.NONE)
    threads = settings.event_threads
    max_blocks = -(-settings.max_blocks // threads)

    def make_tree() -> RadixTree:
        return RadixTree(max_blocks, multiplier=settings.multiplier)

    return ConcurrentIndex(make_tree, threads) if threads > 1 else make_tree()
