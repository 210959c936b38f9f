"""The tiers of a block manager in the engine: commands forwarded to the engine's processes.

GET /tiers, NATS ─▶ EngineTiers.answer ─▶ every worker of the rank ─▶ its ControlSocket
metrics          ◀─ the last status, asked for every `INTERVAL_S`
announcement     ◀─ the blocksets of ranks that share, asked for with it
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from hashlib import blake2b
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from router.errors import InvalidFieldError, KvRouterError
from router.protocol.values import UNREADABLE, Rank
from worker_agent.blocks.names import CacheLevel
from worker_agent.operations.messages import (
    BODY_LIMIT_BYTES,
    MAX_NAMED_PEERS,
    AnnouncedBlockset,
    BlocksetsQuery,
    BlocksReply,
    BlocksReset,
    EngineCommand,
    EngineReply,
    KeepPeers,
    LevelReport,
    NamePeers,
    PeersNamed,
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
from worker_agent.sharing.errors import BlocksetError
from worker_agent.sharing.reports import (
    RankBlocksets,
    RefusedBlockset,
    SharingReport,
    check_rank,
    joined,
)

log = logging.getLogger(__name__)

T = TypeVar("T", bound=Struct)

INTERVAL_S = 2.0
TIMEOUT_S = 15.0
"""More than the time that a command may take in the engine."""
MAX_REPLY_BYTES = 64 << 20
MAX_BLOCKSET_BYTES = BODY_LIMIT_BYTES // MAX_NAMED_PEERS - 1024
"""Limit of a rank's blockset: one command names those of all peers."""
BAD_REQUEST = 400


class EngineTiersError(KvRouterError):
    """The engine's process refused a command, or could not be reached."""

    code = "engine_tiers"

    def __init__(self, address: str, reason: str, status: int = 503) -> None:
        super().__init__(f"{address}: {reason}")
        self.address = address
        self.reason = reason
        self._status = status

    @property
    def http_status(self) -> int:  # type: ignore[override]
        """The status that the engine's process has given; 503 if it could not be reached."""
        return self._status


class _EarlierConnectorError(EngineTiersError):
    """The engine's connector is of an earlier version, or shares no blocks."""


class EngineTiers:
    """The tiers of all ranks of one engine, each with one or more workers."""

    def __init__(
        self,
        worker_id: int,
        addresses: Mapping[int, Sequence[str]],
        shared: Mapping[int, str] | None = None,
        on_blocksets: Callable[[], None] = lambda: None,
    ) -> None:
        """Set up the forwarding; `addresses`: of each rank's workers, the first one first.

        `shared`: where others reach the blocks of each rank that gives any. `on_blocksets`: called
        when `blocksets` have changed.
        """
        self._worker_id = worker_id
        self._addresses = addresses
        self._shared = shared or {}
        self._on_blocksets = on_blocksets
        self.blocksets: dict[int, dict[str, Any]] = {}
        """The blocksets to be announced, by rank, as they were last asked for."""
        self._unfit: dict[Rank, str] = {}
        """Why a blockset is not announced, if it is ours, or not named to the engine."""
        self.imported: dict[int, int] = {}
        """Number of other engines' blocksets that each rank has imported."""
        self.refusals = 0
        """Number of blocksets refused since the start, by the engine or here; each counts once."""
        self._refused: frozenset[RefusedBlockset] = frozenset()
        self._without: set[int] = set()
        """Ranks whose connector is an earlier one, to which peers are named by address alone."""
        self.reports: Sequence[LevelReport] = ()
        """The state when it was last asked for; empty while the engine does not answer."""
        self.problem: str | None = None
        self.failures = 0
        """Number of commands that an engine's process did not execute."""

    async def run(self) -> None:
        """Keep `reports` up to date, until cancelled."""
        while True:
            try:
                self.reports = (await self._status(StatusQuery())).tiers
                await self._learn_blocksets()
                self.problem = None
            except KvRouterError as error:
                if self.problem is None:
                    log.warning("the engine's tiers are unknown: %s", error)
                self.reports, self.problem = (), str(error)
                self._without.clear()  # The engine's next process may have another.
            await asyncio.sleep(INTERVAL_S)

    async def answer(self, command: TierCommand) -> TierReply:
        """Have a command executed by all workers that it concerns.

        Raises InvalidFieldError for a rank that there is not, and EngineTiersError.
        """
        match command:
            case StatusQuery():
                return await self._status(command)
            case ResetPool() | ResetAll():
                return ResetReply(
                    self._worker_id,
                    [
                        _all_reset(dp_rank, await self._of_all(dp_rank, command, ResetReply))
                        for dp_rank in self._chosen(command.dp_rank)
                    ],
                )
            case ResetBlocks():
                return BlocksReply(
                    self._worker_id,
                    command.level,
                    [
                        _all_removed(dp_rank, await self._of_all(dp_rank, command, BlocksReply))
                        for dp_rank in self._chosen(command.dp_rank)
                    ],
                )

    async def name_peers(self, dp_rank: int, peers: Sequence[AnnouncedBlockset]) -> None:
        """Have a rank look for blocks at these engines, but not where it refuses the blockset.

        Its first worker compares them with its own. `peers`: of those that announce no blockset it
        is empty, and they are asked without. Workers that have all this get a line each. Raises
        EngineTiersError.
        """
        first, *others = self._addresses[dp_rank]
        ranks = {Rank(each.worker_id, each.dp_rank) for each in peers}
        for rank in self._unfit.keys() - ranks:
            if rank.worker_id != self._worker_id:
                del self._unfit[rank]
        fit = [each for each in peers if not each.blockset or self._is_fit(each)]
        addresses = [each.address for each in fit]
        if dp_rank not in self._without:
            known = [each for each in fit if each.blockset]
            try:
                named = await self._named(first, NamePeers(addresses=addresses, blocksets=known))
                for address in others:
                    command = NamePeers(addresses=addresses, left_out=named.left_out)
                    await self._named(address, command)
            except _EarlierConnectorError as error:
                self._note_earlier(dp_rank, error)
        if dp_rank in self._without:
            for address in (first, *others):
                await self._asked(address, NamePeers(addresses=addresses))

    async def sharing(self) -> SharingReport:
        """Return the blocksets of all ranks, ours and those of others. Raises EngineTiersError."""
        reports = [(await self._blocksets_of(dp_rank)).report for dp_rank in self._addresses]
        return self._joined(reports)

    def _joined(self, reports: Sequence[SharingReport]) -> SharingReport:
        unfit = [
            RefusedBlockset(rank.worker_id, rank.dp_rank, reason)
            for rank, reason in self._unfit.items()
        ]
        return joined([*reports, SharingReport(refused=unfit)])

    def _count(self, report: SharingReport) -> None:
        self.imported = {dp_rank: len(found) for dp_rank, found in report.imported.items()}
        refused = frozenset(report.refused)
        self.refusals += len(refused - self._refused)
        self._refused = refused

    async def _status(self, query: StatusQuery) -> StatusReply:
        """Return the status of each rank's first worker: the others hold parts of the same."""
        found = [
            await self._reply(self._addresses[dp_rank][0], query, StatusReply)
            for dp_rank in self._chosen(query.dp_rank)
        ]
        advice = dict.fromkeys(line for each in found for line in each.advice)
        tiers = [report for each in found for report in each.tiers]
        return StatusReply(self._worker_id, tiers, list(advice))

    async def _learn_blocksets(self) -> None:
        """Ask each rank that gives blocks for its blockset. Raises EngineTiersError."""
        found: dict[int, dict[str, Any]] = {}
        reports: list[SharingReport] = []
        for dp_rank, address in self._shared.items():
            if dp_rank in self._without:
                continue
            try:
                asked = await self._blocksets_of(dp_rank)
            except EngineTiersError as error:
                if error.http_status != BAD_REQUEST:
                    raise
                self._note_earlier(dp_rank, error)
                continue
            reports.append(asked.report)
            announced = asked.announced
            if announced and self._is_fit(
                AnnouncedBlockset(address, self._worker_id, dp_rank, announced)
            ):
                found[dp_rank] = announced
        self._count(self._joined(reports))
        if found != self.blocksets:
            self.blocksets = found
            self._on_blocksets()

    async def _blocksets_of(self, dp_rank: int) -> RankBlocksets:
        shared = self._shared.get(dp_rank)
        query = BlocksetsQuery(addresses=[] if shared is None else [shared])
        return await self._reply(self._addresses[dp_rank][0], query, RankBlocksets)

    def _is_fit(self, announced: AnnouncedBlockset) -> bool:
        """Return whether a blockset is of its rank and not too large; note why not."""
        rank = Rank(announced.worker_id, announced.dp_rank)
        try:
            check_rank(rank, announced.blockset)
            size_bytes = len(msgspec.json.encode(announced.blockset))
            if size_bytes > MAX_BLOCKSET_BYTES:
                allowed = f"at most {MAX_BLOCKSET_BYTES}"
                raise BlocksetError("bytes", f"{size_bytes}", allowed, rule="too_large")
        except BlocksetError as error:
            if self._unfit.get(rank) != str(error):
                log.warning("blockset of worker %s not used: %s", rank, error)
            self._unfit[rank] = str(error)
            return False
        self._unfit.pop(rank, None)
        return True

    async def _named(self, address: str, command: NamePeers) -> PeersNamed:
        """Name peers to one worker, unless it answers that it has them. Raises EngineTiersError.

        The worker's process knows best: it may be another than the one that was named them.
        """
        revision = blake2b(msgspec.json.encode(command), digest_size=16).hexdigest()
        try:
            named = await self._reply(address, KeepPeers(revision=revision), PeersNamed)
        except EngineTiersError as error:
            if error.http_status == BAD_REQUEST:
                raise _EarlierConnectorError(address, error.reason, BAD_REQUEST) from error
            raise
        if named.revision == revision:
            return named
        return await self._reply(address, replace(command, revision=revision), PeersNamed)

    def _note_earlier(self, dp_rank: int, error: EngineTiersError) -> None:
        log.info("rank %d shares blocks without blocksets: %s", dp_rank, error)
        self._without.add(dp_rank)

    async def _of_all(self, dp_rank: int, command: TierCommand, expected: type[T]) -> list[T]:
        return [
            await self._reply(address, command, expected) for address in self._addresses[dp_rank]
        ]

    async def _reply(self, address: str, command: EngineCommand, expected: type[T]) -> T:
        raw = await self._asked(address, command)
        try:
            return msgspec.json.decode(raw, type=expected)
        except UNREADABLE as error:
            self.failures += 1
            raise EngineTiersError(address, f"not a reply of a connector: {error}") from error

    async def _asked(self, address: str, command: EngineCommand) -> bytes:
        """Return the reply of one worker. Raises EngineTiersError."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                line = await _exchanged(address, msgspec.json.encode(command) + b"\n")
            answer = msgspec.json.decode(line, type=EngineReply)
        except (OSError, TimeoutError, ValueError, *UNREADABLE) as error:
            self.failures += 1
            reason = str(error) or type(error).__name__
            raise EngineTiersError(address, reason) from error
        if answer.refusal is not None:
            self.failures += 1
            raise EngineTiersError(address, answer.refusal.reason, answer.refusal.status)
        return bytes(answer.reply)

    def _chosen(self, dp_rank: int | None) -> Sequence[int]:
        if dp_rank is None:
            return list(self._addresses)
        if dp_rank not in self._addresses:
            raise InvalidFieldError("dp_rank", f"{dp_rank}", ", ".join(map(str, self._addresses)))
        return [dp_rank]


async def _exchanged(address: str, line: bytes) -> bytes:
    """Send one line, and return the line that answers it. Raises OSError, ValueError."""
    at = urlsplit(address)
    if at.scheme == "unix":
        reader, writer = await asyncio.open_unix_connection(at.path, limit=MAX_REPLY_BYTES)
    else:
        reader, writer = await asyncio.open_connection(at.hostname, at.port, limit=MAX_REPLY_BYTES)
    with closing(writer):
        writer.write(line)
        await writer.drain()
        answer = await reader.readline()
    if not answer.endswith(b"\n"):
        raise OSError("hung up")
    return answer


def _all_reset(dp_rank: int, replies: Sequence[ResetReply]) -> RankReset:
    """Join the outcomes of a rank's workers: a level is reset if it is in all of them."""
    outcomes = [rank for each in replies for rank in each.ranks]
    failed: dict[CacheLevel, str] = {}
    for outcome in outcomes:
        failed |= outcome.failed
    first = outcomes[0]
    reset = [level for level in first.reset if level not in failed]
    return RankReset(dp_rank, reset, failed, first.skipped_unconfigured)


def _all_removed(dp_rank: int, replies: Sequence[BlocksReply]) -> BlocksReset:
    """Join the outcomes of a rank's workers: a block is removed if it is in all of them."""
    outcomes = [rank for each in replies for rank in each.ranks]
    kept = {each for outcome in outcomes for each in outcome.not_reset}
    removed = dict.fromkeys(each for outcome in outcomes for each in outcome.reset_blocks)
    found = kept | removed.keys()
    missing = dict.fromkeys(each for outcome in outcomes for each in outcome.not_found)
    return BlocksReset(
        dp_rank,
        reset_blocks=[each for each in removed if each not in kept],
        not_found=[each for each in missing if each not in found],
        not_reset=sorted(kept),
    )
