"""The connector in vLLM's scheduler, and the contents of all workers' tiers.

The leader cannot hold blocks in the workers' tiers: a block may be gone before it is loaded, and
the load then fails.

The connector in vLLM's scheduler: translates between vLLM, the leader and the workers.

    begin ─▶ matched (again while workers look) ─▶ allocated ─▶ instructions ─▶ … ─▶ finished
                                                    learn ◀── news of all workers

Time is an argument. Blocks that cannot be loaded are computed. A request that vLLM holds for a load
is always reported by the workers; otherwise vLLM would wait forever.
"""

from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any

from router.protocol.values import Tier
from worker_agent.blocks.changes import MergedTiers
from worker_agent.blocks.names import Naming
from worker_agent.connector.slots.block_groups import BlockGroups
from worker_agent.connector.slots.held_prefix import LowerTier
from worker_agent.connector.slots.leader import ConnectorLeader
from worker_agent.connector.slots.protocol import Matched
from worker_agent.connector.slots.rank_reports import RankReports
from worker_agent.connector.slots.slot_blocks import NO_BLOCK, BlockTables
from worker_agent.connector.slots.slot_manager import SlotManager
from worker_agent.connector.slots.slot_table import SlotState
from worker_agent.connector.vllm_parts.counters import ReportedCounts, Values, of_scheduler
from worker_agent.connector.vllm_parts.engine import EngineGeometry
from worker_agent.connector.vllm_parts.messages import GivenUp, Instructions, encoded, worker_events
from worker_agent.connector.vllm_parts.remote_lookups import MAX_BLOCKS, RemoteLookups
from worker_agent.connector.vllm_parts.settings import ConnectorSettings
from worker_agent.connector.vllm_parts.steps import VllmRequest, prompt_of, scheduled_step
from worker_agent.manager.settings import cache_secret
from worker_agent.tiers.stack import TierChange

LOWER_TIERS = (Tier.HOST, Tier.DISK, Tier.REMOTE)


class Inventory:
    """Contents of all workers' tiers. A block is usable if every worker has its part of it."""

    __slots__ = ("_ranks",)

    def __init__(self, num_ranks: int) -> None:
        self._ranks = [MergedTiers() for _ in range(num_ranks)]

    def __len__(self) -> int:
        """Return the largest number of blocks that any worker has."""
        return max(len(rank) for rank in self._ranks)

    def apply(self, rank: int, changes: Sequence[TierChange]) -> None:
        """Apply a worker's changes, in order. O(changes)."""
        for each in changes:
            self._ranks[rank].apply(1 << each.tier, [each.change])

    def has(self, identity: bytes, slowest: Tier) -> bool:
        """Return whether every worker has the block in this tier or a faster one."""
        mask = (2 << slowest) - 1
        return all(rank.tiers(identity) & mask for rank in self._ranks)

    def clear(self) -> None:
        """Forget all blocks: the tiers are about to be cleared."""
        self._ranks = [MergedTiers() for _ in self._ranks]

    def sources(self, looks: RemoteLookups | None = None) -> list[LowerTier]:
        """Return the tiers in which slots look for blocks; behind all, peers as looked up."""
        return [LowerTier(tier, _ReportedTier(self, tier, looks)) for tier in LOWER_TIERS]


class _ReportedTier:
    """A tier together with the faster ones, which may alternate within a prompt.

    Peers are beyond the slowest tier.
    """

    __slots__ = ("_inventory", "_looks", "_tier")

    def __init__(self, inventory: Inventory, tier: Tier, looks: RemoteLookups | None) -> None:
        self._inventory = inventory
        self._tier = tier
        self._looks = looks if tier is LOWER_TIERS[-1] else None

    def match(self, identities: Sequence[bytes]) -> list[int]:
        """Return places for the leading blocks found here. O(blocks found)."""
        return list(range(sum(1 for _ in takewhile(self._has, identities))))

    def _has(self, identity: bytes) -> bool:
        is_here = self._inventory.has(identity, self._tier)
        return is_here or (self._looks is not None and self._looks.is_at_peers(identity))

    def release(self, blocks: Sequence[int]) -> None:
        """Do nothing: no block is held."""


QUIET_S = 60.0
"""Time after the last request in which vLLM keeps stepping without work, to offload blocks."""

START_S = 2.0
"""Longest time that the first requests wait for the recovery of persisted blocks."""

_NOTHING = Matched(0, is_async=False)


class SchedulerSide:
    """The scheduler half of one engine. Belongs to the scheduler's thread.

    Invariant: `_awaited` are exactly the requests of which vLLM is to free the blocks later.
    """

    __slots__ = (
        "_awaited",
        "_busy_ranks",
        "_first_s",
        "_forgets",
        "_given_up",
        "_looks",
        "_model",
        "_prompts",
        "_quiet_since_s",
        "_reported",
        "_reports",
        "_secret",
        "_starting_ranks",
        "inventory",
        "leader",
        "slots",
    )

    def __init__(self, settings: ConnectorSettings, facts: EngineGeometry) -> None:
        """Create the half. Raises ConfigError if the cache secret cannot be stored."""
        self._secret = cache_secret(settings.tiers, settings.worker.id, settings.block_keys.read())
        self._model = facts.model
        self.inventory = Inventory(facts.num_ranks)
        groups = BlockGroups(facts.groups)
        has_looks = bool(settings.tiers.remote_cache_url or settings.finds_peers)
        self._looks = RemoteLookups(facts.num_ranks) if has_looks else None
        self.slots = SlotManager(groups, self._naming(), self.inventory.sources(self._looks))
        self.leader = ConnectorLeader(self.slots)
        self._reports = RankReports(facts.num_ranks)
        self._prompts: dict[str, VllmRequest] = {}
        self._given_up: list[GivenUp] = []
        self._forgets = False
        self._awaited: set[str] = set()
        self._busy_ranks: set[int] = set()
        self._starting_ranks = set(range(facts.num_ranks))
        self._first_s: float | None = None
        self._quiet_since_s = 0.0
        self._reported = ReportedCounts()

    @property
    def late_looks(self) -> int:
        """Number of lookups that did not end in time."""
        return 0 if self._looks is None else self._looks.late

    # ── A request ────────────────────────────────────────────────────────────────────────────────

    def begin(self, request: Any) -> None:
        """Follow a request of vLLM if possible; otherwise it is computed without the connector."""
        prompt = prompt_of(request)
        if prompt is not None:
            self._prompts[prompt.key] = prompt

    def matched(self, key: str, num_computed: int, now_s: float) -> Matched | None:
        """Return how many tokens can be loaded. Returns None if it has to be called again."""
        prompt = self._prompts.get(key)
        if prompt is None:
            return _NOTHING
        prompt.num_computed_tokens = num_computed
        if self._starting_ranks and self._is_too_soon(now_s):
            return None
        is_known = self.slots.has_slot(key)
        found = self.leader.get_num_new_matched_tokens(prompt.for_leader(is_known), num_computed)
        if self._is_looked_for(prompt, num_computed + found.tokens, now_s):
            return None
        return found

    def allocated(
        self, key: str, blocks: BlockTables, num_external_tokens: int, now_s: float
    ) -> None:
        """Record a request's blocks, all of each group, of which vLLM expects some to be loaded.

        `num_external_tokens`: number of tokens that vLLM expects to be loaded.
        """
        prompt = self._prompts.get(key)
        refused = self.leader.counters.refused
        if prompt is not None:
            self.leader.update_state_after_alloc(key, blocks, num_external_tokens, now_s)
        if num_external_tokens and (prompt is None or refused < self.leader.counters.refused):
            computed = 0 if prompt is None else prompt.num_computed_tokens
            self._given_up.append(GivenUp(key, self._behind(blocks, computed)))
            self._prompts.pop(key, None)  # It would be matched again without end.

    def finished(self, key: str, now_s: float) -> bool:
        """Finish a request; return True if its blocks are freed only after workers report it."""
        self._prompts.pop(key, None)
        self._quiet_since_s = now_s
        if self._looks is not None:
            self._looks.forget(key)
        is_later = self.leader.request_finished(key, now_s)
        if is_later:
            self._awaited.add(key)
        return is_later

    def rename(self, weights: str) -> None:
        """Rename all blocks for new weights, so that no block of earlier weights is found.

        Present requests are computed without the connector. The workers clear their own tiers, so
        that routers do not count on blocks that cannot be found.
        """
        self._forgets = True
        self._prompts.clear()
        self.slots.rename(self._naming(weights))

    # ── A step ───────────────────────────────────────────────────────────────────────────────────

    def instructions(self, output: Any, now_s: float) -> bytes:
        """Encode the workers' instructions for the step of this `SchedulerOutput`."""
        self.leader.tick(now_s)  # Its lost loads need no action: the workers time out first.
        plan = self.leader.build_connector_metadata(scheduled_step(output, self._prompts))
        looks = [] if self._looks is None else self._looks.take()
        given_up, self._given_up = self._given_up, []
        forgets, self._forgets = self._forgets, False
        return encoded(Instructions(plan, looks, given_up, forgets))

    def learn(self, messages: Sequence[bytes]) -> None:
        """Process encoded messages of workers."""
        for each in map(worker_events, messages):
            self.inventory.apply(each.rank, each.changes)
            if self._looks is not None:
                self._looks.answered(each.rank, each.looked)
            if not each.is_starting:
                self._starting_ranks.discard(each.rank)
            (self._busy_ranks.add if each.is_busy else self._busy_ranks.discard)(each.rank)
            self.leader.update(self._reports.add(each.rank, each.report))

    def still_to_free(self, loaded: Iterable[str], stored: Iterable[str]) -> set[str]:
        """Return the requests, of those that all workers report as stored, still to be freed.

        If steps overlap, vLLM may have finished a request that is reported as loaded. It frees the
        blocks at that report, and would fail if the request were named again.
        """
        self._awaited.difference_update(loaded)
        freed = self._awaited.intersection(stored)
        self._awaited -= freed
        return freed

    def has_work(self, now_s: float) -> bool:
        """Return whether steps are needed without requests: for offloading or clearing tiers."""
        return self._forgets or (bool(self._busy_ranks) and now_s < self._quiet_since_s + QUIET_S)

    def take_counted(self) -> Values:
        """Return the changes of the counters since the last call."""
        return self._reported.increases(self._counted())

    def _counted(self) -> Values:
        leader, quarantine = self.leader, self.slots.quarantine
        return of_scheduler(
            leader.counters, self.late_looks, quarantine.released_blocks, leader.quarantined_blocks
        )

    # ── How ──────────────────────────────────────────────────────────────────────────────────────

    def _is_too_soon(self, now_s: float) -> bool:
        """Return whether the first request came less than `START_S` ago.

        In that time the tiers' persisted blocks are recovered. Blocks not known by then are not
        waited for.
        """
        if self._first_s is None:
            self._first_s = now_s
        return now_s < self._first_s + START_S

    def _behind(self, blocks: BlockTables, num_computed: int) -> tuple[int, ...]:
        """Return a request's blocks behind those that the engine has computed."""
        groups = self.slots.groups.all
        return tuple(
            block
            for group, table in zip(groups, blocks, strict=True)
            for block in table[num_computed // group.block_size :]
            if block != NO_BLOCK
        )

    def _naming(self, weights: str = "") -> Naming:
        return Naming(self._secret, f"{self._model}/{weights}" if weights else self._model)

    def _is_looked_for(self, prompt: VllmRequest, known_tokens: int, now_s: float) -> bool:
        """Return whether workers are still looking up blocks of the prompt that are not known here.

        If so, the staged blocks are released, to be staged again together with those found.
        """
        key, num_computed = prompt.key, prompt.num_computed_tokens
        if self._looks is None or not self.slots.has_slot(key):
            return False
        slot = self.slots.get_slot(key)
        if slot.failed_blocks or known_tokens >= slot.last_boundary:
            return False
        is_new = key not in self._looks
        names = slot.names_behind(num_computed, known_tokens, MAX_BLOCKS) if is_new else ()
        if not self._looks.look_up(key, names, now_s, prompt.source):
            return False
        if slot.state is SlotState.ONBOARD_STAGED:
            slot.preempt(self.leader.iteration)
        return True
