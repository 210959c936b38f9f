"""Control of an agent's tiers by operators: status, and removal of blocks.

Each call runs on the tier's own thread, where its changes are published to routers like any others;
no call waits longer than `TIMEOUT_S`.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from msgspec import Struct

from router.errors import InvalidFieldError, KvRouterError
from router.protocol.values import U64_MAX
from router.sequence.hashing.keyed_hashes import HashKeying
from worker_agent.blocks.names import CacheLevel
from worker_agent.blocks.pool_values import NamedBlocks, ResetOutcome
from worker_agent.manager.manager import KvBlockManager
from worker_agent.manager.reports import levels_of, on_bus, reports
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
from worker_agent.storage.errors import StorageError
from worker_agent.transfer.block_tier import BlockTier

T = TypeVar("T")

TIMEOUT_S = 10.0


class ControlledRank(Struct, frozen=True):
    """A rank's tiers. `wake` makes its engine publish changes on the device."""

    manager: KvBlockManager
    wake: Callable[[], None]


class TierControl:
    """Control of all ranks of a worker; `status` runs on any thread, the rest on the loop."""

    def __init__(
        self, worker_id: int, naming: HashKeying, ranks: Mapping[int, ControlledRank]
    ) -> None:
        """Set up the control; `naming`: the scheme of block hashes on the bus."""
        self._worker_id = worker_id
        self._naming = naming
        self._ranks = ranks

    async def answer(self, command: TierCommand) -> TierReply:
        """Execute a command.

        Raises InvalidFieldError for a rank or a level that this worker does not have, and
        StorageError for a tier that does not respond in time.
        """
        match command:
            case StatusQuery():
                if command.hashes:  # takes a second for a million blocks
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
        """Return the status. Raises InvalidFieldError for a rank or level this worker lacks."""
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

    # ── Parts ────────────────────────────────────────────────────────────────────────────────────

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
                "level", level, "G1, G2, G3: blocks of G4 are shared with other workers"
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
        return _rank_reset(dp_rank, wanted, identities, outcome)

    def _identities(self, named: NamedBlocks) -> dict[int, list[bytes]]:
        """Return the identities in a pool by block hash on the bus."""
        names = [name for names in named.by_use() for name in names]
        identities: dict[int, list[bytes]] = {}
        for name, bus_hash in zip(names, on_bus(names, self._naming), strict=True):
            identities.setdefault(bus_hash, []).append(name.identity)
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
    """Call a tier on its thread. Raises what the call raises; StorageError if it is late."""

    def refusing(tier: BlockTier) -> T | KvRouterError:
        try:
            return call(tier)
        except KvRouterError as error:  # expected: the tier stays usable
            return error

    try:
        async with asyncio.timeout(TIMEOUT_S):
            answer = await asyncio.wrap_future(manager.stack.call(level.tier, refusing))
    except TimeoutError as error:
        allowed = f"a tier that responds within {TIMEOUT_S:g} s"
        raise StorageError(level, "no response", allowed) from error
    if isinstance(answer, KvRouterError):
        raise answer
    return answer


def _rank_reset(
    dp_rank: int,
    wanted: Sequence[int],
    identities: Mapping[int, Sequence[bytes]],
    outcome: ResetOutcome,
) -> BlocksReset:
    """Return the outcome; a hash of two blocks counts as reset if both are."""
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
    """Return distinct unsigned hashes, in order. Raises InvalidFieldError."""
    for each in hashes:
        if not -(1 << 63) <= each <= U64_MAX:
            raise InvalidFieldError(field, f"{each}", "64-bit hashes", status=422)
    return list(dict.fromkeys(each & U64_MAX for each in hashes))
