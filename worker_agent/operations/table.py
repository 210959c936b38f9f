"""The tiers of an agent as a table."""

from collections.abc import Sequence

from router.runtime.process.tables import table
from worker_agent.operations.messages import LevelReport, StatusReply, TierTraffic

HEADS = (
    "rank", "tier", "blocks", "used", "kept", "free", "hit", "stored", "B/s in", "loaded",
    "B/s out", "failed", "waiting", "pace B/s", "",
)  # fmt: skip
_NOTHING = "-"
_UNITS = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))


def tier_table(now: StatusReply, before: StatusReply | None = None, passed_s: float = 0.0) -> str:
    """Return a table with a line per tier, and advice.

    Hits: the share of the prompt blocks requested from the rank. Bytes per second: since `before`,
    `passed_s` ago; without it, over the time spent storing and loading.
    """
    wanted = {
        each.dp_rank: each.pool.requested
        for each in now.tiers
        if each.pool is not None and each.traffic is None
    }
    earlier = {(each.dp_rank, each.level): each for each in before.tiers} if before else {}
    rows = [
        _row(each, earlier.get((each.dp_rank, each.level)), passed_s, wanted.get(each.dp_rank, 0))
        for each in now.tiers
    ]
    return "\n".join([table(HEADS, rows), *(f"advice: {line}" for line in now.advice)])


def _row(
    now: LevelReport, before: LevelReport | None, passed_s: float, wanted_blocks: int
) -> Sequence[object]:
    blocks = (now.num_blocks, now.active_blocks, now.inactive_blocks, now.empty_blocks)
    cells = [now.dp_rank, now.level, *blocks, _hit_rate(now, wanted_blocks)]
    through = now.traffic
    if through is None:
        return [*cells, *[_NOTHING] * 7, ""]
    earlier = before.traffic if before else None
    return [
        *cells,
        through.stored_blocks,
        _speed(through, earlier, passed_s, "stored_bytes", "store_s"),
        through.loaded_blocks,
        _speed(through, earlier, passed_s, "loaded_bytes", "load_s"),
        through.store_failures + through.load_failures,
        through.waiting_blocks,
        _short(through.pace_bytes_per_s),
        "broken" if through.is_broken else "",
    ]


def _hit_rate(now: LevelReport, wanted_blocks: int) -> str:
    if not wanted_blocks:
        return _NOTHING
    through, pool = now.traffic, now.pool
    hits = through.loaded_blocks if through else pool.matched if pool else 0
    return f"{100 * hits / wanted_blocks:.0f}%"


def _speed(
    now: TierTraffic, before: TierTraffic | None, passed_s: float, size: str, spent: str
) -> str:
    size_bytes, seconds = getattr(now, size), getattr(now, spent)
    if before is not None:
        size_bytes, seconds = size_bytes - getattr(before, size), passed_s
    return _short(size_bytes / seconds) if seconds else _NOTHING


def _short(number: float) -> str:
    for unit, size in _UNITS:
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number:.0f}"
