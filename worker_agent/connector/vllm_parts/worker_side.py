"""The connector in a worker of vLLM's: its tiers, and the worker that moves blocks.

    instructions ─▶ begin ─▶ start_load ─▶ … ─▶ end ─▶ finished, load_errors ─▶ news

The tiers live in this process, one stack for each worker, for a block's part of each lies in its
memory. All calls are made on the worker's thread; time is an argument.
"""

from collections.abc import Iterable, Mapping
from concurrent.futures import Future

from torch import Tensor

from router.protocol.values import SCHEME, Identity, Tier
from router.publisher.engine_address import rank_endpoint
from worker_agent.connector.tier_news import TierNews
from worker_agent.connector.vllm_parts.counted import Told, Values, of_worker
from worker_agent.connector.vllm_parts.facts import EngineFacts, tiers_of
from worker_agent.connector.vllm_parts.layouts import layout_groups
from worker_agent.connector.vllm_parts.messages import Look, News, encoded, instructions
from worker_agent.connector.vllm_parts.settings import ConnectorSettings
from worker_agent.connector.worker import FinishedTransfers, register_kv_caches
from worker_agent.manager import KvBlockManager
from worker_agent.transfer.block_tier import BlockTier


class WorkerSide:
    """One worker's. Closing it ends what is under way, and gives all memory back."""

    __slots__ = ("_events", "_looked", "_looks", "_rank", "_told", "given_up", "manager", "worker")

    def __init__(
        self, settings: ConnectorSettings, facts: EngineFacts, tensors: Mapping[str, Tensor]
    ) -> None:
        """Over the engine's own tensors. Raises LayoutError for one that is laid out in a way that
        cannot be told; ConfigError, StorageError for tiers that cannot be had.
        """
        groups = layout_groups(tensors, facts.num_blocks, facts.block_size)
        block_bytes = sum(group.config.block_bytes for group in groups)
        self._rank = facts.rank
        self._looks: dict[int, Future[int]] = {}
        self._looked: list[int] = []
        self._told = Told()
        self.given_up = 0
        """Requests whose loads the leader took back."""
        self.manager = KvBlockManager(tiers_of(settings, facts, block_bytes))
        self._events: TierNews | None = None
        try:
            if settings.tier_events and not facts.rank:  # the other ranks' tiers hold the same
                self._events = _events(settings.tier_events, facts)
            agent, timeout_s = f"{settings.id}", settings.onboard_timeout_s
            stack = self.manager.stack
            self.worker = register_kv_caches(agent, stack, tensors, groups, timeout_s)
        except BaseException:
            self.close()
            raise

    def void(self, message: bytes) -> None:
        """The engine writes over blocks from now on that it took away; again is nothing."""
        self.worker.void(instructions(message).plan.voided)

    def begin(self, message: bytes) -> None:
        """What is to be done in this step. Raises InvalidFieldError for one out of order."""
        told = instructions(message)
        # What a look that is over has found is told with this step's changes at the latest.
        self._looked += [number for number, answer in self._looks.items() if answer.done()]
        for number in self._looked:
            self._looks.pop(number, None)
        if told.forgets:
            self.manager.stack.clear(is_shared_kept=True)
        self.worker.bind(told.plan)
        for look in told.looks:
            self._look(look)
        for each in told.given_up:
            self.given_up += 1
            self.worker.give_up_load(each.key, each.blocks)

    def finished(self, keys: Iterable[str], now_s: float) -> FinishedTransfers:
        """vLLM is done with these requests; what is over since the last call."""
        return self.worker.get_finished(keys, now_s)

    def news(self) -> bytes:
        """What was done since the last call, for the wire."""
        looked, self._looked = self._looked, []
        is_busy = self.worker.under_way > 0 or self.manager.stack.is_storing
        report, changes = self.worker.take_report(), self.worker.take_changes()
        if self._events is not None:
            self._events.tell(changes)
        is_starting = not self.manager.stack.is_probed  # which comes after
        return encoded(News(self._rank, report, changes, looked, is_busy, is_starting))

    def take_counted(self) -> Values:
        """What was counted since the last call."""
        tiers, is_first = self.manager.stack.status(), not self._rank
        counted = of_worker(self.worker.counters, self.given_up, tiers, is_first=is_first)
        return self._told.increases(counted)

    def close(self) -> None:
        """Blocking; again is nothing."""
        if self._events is not None:
            self._events.close()
        self.manager.close()

    def _look(self, look: Look) -> None:
        from worker_agent.remote_level import found_in  # only where there is such a tier

        def find(tier: BlockTier) -> int:
            return found_in(tier, look.names)

        self._looks[look.number] = self.manager.stack.ask(Tier.REMOTE, find)


def _events(address: str, facts: EngineFacts) -> TierNews:
    """Raises PeerError, and ConfigError for what is no address."""
    of_rank = rank_endpoint(address, facts.dp_rank, "tier_events")
    return TierNews(of_rank, Identity(SCHEME, facts.block_size), facts.dp_rank)
