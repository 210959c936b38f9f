"""What operators ask of an agent's tiers: how they are, and to give blocks up.

Each call reaches a tier on its own thread, where what it changes is told to routers like any other
change; none waits for more than `TIMEOUT_S`.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from msgspec import Struct

from router.block_errors import StorageError
from router.errors import InvalidFieldError, KvRouterError
from router.protocol.values import U64_MAX
from router.sequence.naming import BlockNaming
from worker_agent.blocks.levels import CacheLevel
from worker_agent.blocks.pool_values import NamedBlocks, ResetOutcome
from worker_agent.manager import KvBlockManager
from worker_agent.operations.messages import (
    BlocksReply,
    BlocksReset,
    RankReset,
    ResetAll,
    ResetBlocks,
    ResetPool,
    ResetReply,
    StatusQuery,
    StatusReply,
    TierCommand,
    TierReply,
)
from worker_agent.operations.reports import levels_of, on_bus, reports
from worker_agent.transfer.block_tier import BlockTier

T = TypeVar("T")

TIMEOUT_S = 10.0


class ControlledRank(Struct, frozen=True):
    """A rank's tiers. `wake` makes its engine tell what changed on the device."""

    manager: KvBlockManager
    wake: Callable[[], None]


class TierControl:
    """Of all ranks of a worker. `status` may be called on any thread, the others on the loop."""

    def __init__(
        self, worker_id: int, naming: BlockNaming, ranks: Mapping[int, ControlledRank]
    ) -> None:
        """`naming`: what blocks are called on the bus."""
        self._worker_id = worker_id
        self._naming = naming
        self._ranks = ranks

    async def answer(self, command: TierCommand) -> TierReply:
        """Raises InvalidFieldError for a rank or a level that this worker does not have, and
        StorageError for a tier that does not answer in time.
        """
        match command:
            case StatusQuery():
                if command.hashes:  # of a million blocks that takes a second
                    return await asyncio.to_thread(self.status, command)
                return self.status(command)
            case ResetPool():
                self._check_level(command.level, self._chosen(command.dp_rank))
                return await self._reset(command.dp_rank, (command.level,))
            case ResetAll():
                return await self._reset(command.dp_rank, tuple(CacheLevel))
            case ResetBlocks():
                return await self._reset_blocks(command)

    def status(self, query: StatusQuery) -> StatusReply:
        """Raises InvalidFieldError for a rank or a level that this worker does not have."""
        chosen = self._chosen(query.dp_rank)
        if query.level is not None:
            self._check_level(query.level, chosen)
        naming = self._naming if query.hashes else None
        found = [
            report
            for dp_rank, rank in chosen.items()
            for report in reports(dp_rank, rank.manager, naming)
            if query.level in {None, report.level}
        ]
        advice = {line: None for rank in chosen.values() for line in rank.manager.advice()}
        return StatusReply(self._worker_id, found, list(advice))

    # ── How ──────────────────────────────────────────────────────────────────────────────────────

    async def _reset(self, dp_rank: int | None, levels: Sequence[CacheLevel]) -> ResetReply:
        ranks = []
        for number, rank in self._chosen(dp_rank).items():
            outcome = RankReset(number, [], {}, [])
            for level in levels:
                await self._reset_level(rank, level, outcome)
            ranks.append(outcome)
        return ResetReply(self._worker_id, ranks)

    async def _reset_level(
        self, rank: ControlledRank, level: CacheLevel, outcome: RankReset
    ) -> None:
        if level not in levels_of(rank.manager):
            outcome.skipped_unconfigured.append(level)
            return
        try:
            if level is CacheLevel.G1:
                rank.manager.pools()[level].reset()
                rank.wake()
            else:
                await _on_tier(rank.manager, level, lambda tier: tier.reset())
        except KvRouterError as error:
            outcome.failed[level] = str(error)
        else:
            outcome.reset.append(level)

    async def _reset_blocks(self, command: ResetBlocks) -> BlocksReply:
        chosen, level = self._chosen(command.dp_rank), command.level
        self._check_level(level, chosen)
        if level is CacheLevel.G4:
            raise InvalidFieldError(
                "level", level, "G1, G2, G3: other workers name G4's blocks, too"
            )
        wanted = _u64("sequence_hashes", command.sequence_hashes)
        ranks = [
            await self._reset_in(dp_rank, rank, level, wanted) for dp_rank, rank in chosen.items()
        ]
        return BlocksReply(self._worker_id, level, ranks)

    async def _reset_in(
        self, dp_rank: int, rank: ControlledRank, level: CacheLevel, wanted: Sequence[int]
    ) -> BlocksReset:
        pool = rank.manager.pools()[level]
        identities = await asyncio.to_thread(self._identities, pool.named())
        found = [identity for each in wanted for identity in identities.get(each, ())]
        if level is CacheLevel.G1:
            outcome = pool.reset_blocks(found)
            rank.wake()
        else:
            outcome = await _on_tier(rank.manager, level, lambda tier: tier.remove(found))
        return _told(dp_rank, wanted, identities, outcome)

    def _identities(self, named: NamedBlocks) -> dict[int, list[bytes]]:
        """What pools go by, of each name on the bus."""
        names = [name for names in named.by_use() for name in names]
        identities: dict[int, list[bytes]] = {}
        for name, told in zip(names, on_bus(names, self._naming), strict=True):
            identities.setdefault(told, []).append(name.identity)
        return identities

    def _chosen(self, dp_rank: int | None) -> Mapping[int, ControlledRank]:
        if dp_rank is None:
            return self._ranks
        if dp_rank not in self._ranks:
            allowed = ", ".join(str(each) for each in self._ranks)
            raise InvalidFieldError("dp_rank", f"{dp_rank}", allowed)
        return {dp_rank: self._ranks[dp_rank]}

    def _check_level(self, level: CacheLevel, chosen: Mapping[int, ControlledRank]) -> None:
        there = {each for rank in chosen.values() for each in levels_of(rank.manager)}
        if level not in there:
            raise InvalidFieldError("level", f"{level} is not configured", ", ".join(sorted(there)))


async def _on_tier(manager: KvBlockManager, level: CacheLevel, call: Callable[[BlockTier], T]) -> T:
    """Make a call on a tier's thread. Raises what it raises, and StorageError when it is late."""

    def refusing(tier: BlockTier) -> T | KvRouterError:
        try:
            return call(tier)
        except KvRouterError as error:  # expected: the tier goes on
            return error

    try:
        async with asyncio.timeout(TIMEOUT_S):
            answer = await asyncio.wrap_future(manager.stack.ask(level.tier, refusing))
    except TimeoutError as error:
        allowed = f"a tier that answers within {TIMEOUT_S:g} s"
        raise StorageError(level, "no answer", allowed) from error
    if isinstance(answer, KvRouterError):
        raise answer
    return answer


def _told(
    dp_rank: int,
    wanted: Sequence[int],
    identities: Mapping[int, Sequence[bytes]],
    outcome: ResetOutcome,
) -> BlocksReset:
    """A hash that two blocks have is reset if both are."""
    kept = set(outcome.not_reset)
    found = [each for each in wanted if each in identities]
    in_use = {each for each in found if kept.intersection(identities[each])}
    return BlocksReset(
        dp_rank,
        reset_blocks=[each for each in found if each not in in_use],
        not_found=[each for each in wanted if each not in identities],
        not_reset=[each for each in found if each in in_use],
    )


def _u64(field: str, hashes: Sequence[int]) -> list[int]:
    """Distinct, in order; signed ones are as good. Raises InvalidFieldError."""
    for each in hashes:
        if not -(1 << 63) <= each <= U64_MAX:
            raise InvalidFieldError(field, f"{each}", "64-bit hashes", status=422)
    return list(dict.fromkeys(each & U64_MAX for each in hashes))
