"""The connector in vLLM's scheduler: its requests to the leader, the leader's plans to the workers.

    begin ─▶ matched (again while workers look) ─▶ allocated ─▶ instructions ─▶ … ─▶ finished
                                                    learn ◀── news of all workers

Time is an argument. Whatever cannot be loaded is computed; a request that vLLM has wait for a load
is always named by the workers, or vLLM would wait for ever.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from worker_agent.agent_tiers import cache_secret
from worker_agent.blocks.names import Naming
from worker_agent.connector.leader import ConnectorLeader
from worker_agent.connector.protocol import Matched
from worker_agent.connector.rank_reports import RankReports
from worker_agent.connector.slot_manager import SlotManager
from worker_agent.connector.slot_table import SlotState
from worker_agent.connector.vllm_parts.counted import Told, Values, of_scheduler
from worker_agent.connector.vllm_parts.facts import EngineFacts
from worker_agent.connector.vllm_parts.inventory import Inventory
from worker_agent.connector.vllm_parts.looks import Looks
from worker_agent.connector.vllm_parts.messages import GivenUp, Instructions, encoded, news
from worker_agent.connector.vllm_parts.settings import ConnectorSettings
from worker_agent.connector.vllm_parts.steps import Prompt, prompt_of, scheduled_step

QUIET_S = 60.0
"""For so long after the last request steps without work are asked for, so that blocks go down."""

START_S = 2.0
"""So long the first request waits at most for what a former life left."""

_NOTHING = Matched(0, is_async=False)


class SchedulerSide:
    """One engine's. Belongs to the scheduler's thread.

    Invariant: vLLM is to free later exactly the requests in `_awaited`.
    """

    __slots__ = (
        "_awaited",
        "_block_size",
        "_busy_ranks",
        "_first_s",
        "_forgets",
        "_given_up",
        "_looks",
        "_model",
        "_prompts",
        "_quiet_since_s",
        "_reports",
        "_secret",
        "_starting_ranks",
        "_told",
        "inventory",
        "leader",
        "slots",
    )

    def __init__(self, settings: ConnectorSettings, facts: EngineFacts) -> None:
        """Raises ConfigError for a secret that cannot be kept."""
        self._secret = cache_secret(settings)
        self._model = facts.model
        self.inventory = Inventory(facts.num_ranks)
        self.slots = SlotManager(facts.block_size, self._naming(), self.inventory.sources())
        self.leader = ConnectorLeader(self.slots)
        self._block_size = facts.block_size
        self._reports = RankReports(facts.num_ranks)
        self._looks = Looks(facts.num_ranks) if settings.remote_cache_url else None
        self._prompts: dict[str, Prompt] = {}
        self._given_up: list[GivenUp] = []
        self._forgets = False
        self._awaited: set[str] = set()
        self._busy_ranks: set[int] = set()
        self._starting_ranks = set(range(facts.num_ranks))
        self._first_s: float | None = None
        self._quiet_since_s = 0.0
        self._told = Told()

    @property
    def late_looks(self) -> int:
        """Questions to workers that were not answered in time."""
        return 0 if self._looks is None else self._looks.late

    # ── A request ────────────────────────────────────────────────────────────────────────────────

    def begin(self, request: Any) -> None:
        """Follow a request of vLLM's, if it can be; one that is not is computed without us."""
        prompt = prompt_of(request)
        if prompt is not None:
            self._prompts[prompt.key] = prompt

    def matched(self, key: str, num_computed: int, now_s: float) -> Matched | None:
        """How many tokens can be loaded after those; None: ask again at the next step."""
        prompt = self._prompts.get(key)
        if prompt is None:
            return _NOTHING
        prompt.num_computed_tokens = num_computed
        if self._starting_ranks and self._is_too_soon(now_s):
            return None
        is_known = self.slots.has_slot(key)
        found = self.leader.get_num_new_matched_tokens(prompt.asked(is_known), num_computed)
        if self._is_looked_for(key, num_computed + found.tokens, now_s):
            return None
        return found

    def allocated(
        self, key: str, blocks: Sequence[int], num_external_tokens: int, now_s: float
    ) -> None:
        """vLLM gave a request these blocks, all it has; so many tokens it takes to be loaded."""
        prompt = self._prompts.get(key)
        refused = self.leader.counters.refused
        if prompt is not None:
            self.leader.update_state_after_alloc(key, blocks, num_external_tokens, now_s)
        if num_external_tokens and (prompt is None or refused < self.leader.counters.refused):
            computed = 0 if prompt is None else prompt.num_computed_tokens
            self._given_up.append(GivenUp(key, tuple(blocks[computed // self._block_size :])))

    def finished(self, key: str, now_s: float) -> bool:
        """vLLM is done with a request; whether its blocks are freed later, when workers name it."""
        self._prompts.pop(key, None)
        self._quiet_since_s = now_s
        if self._looks is not None:
            self._looks.forget(key)
        is_later = self.leader.request_finished(key, now_s)
        if is_later:
            self._awaited.add(key)
        return is_later

    def rename(self, weights: str) -> None:
        """The engine has other weights, never seen before: blocks have other names from now on, so
        that none of those that are kept is found. Requests that are here are computed without us,
        and workers forget what nobody finds, so that routers do not go by it.
        """
        self._forgets = True
        self._prompts.clear()
        self.slots.rename(self._naming(weights))

    # ── A step ───────────────────────────────────────────────────────────────────────────────────

    def instructions(self, output: Any, now_s: float) -> bytes:
        """What the workers are to do in the step of this `SchedulerOutput`, for the wire."""
        self.leader.tick(now_s)  # what it finds lost workers have answered: their time is shorter
        plan = self.leader.build_connector_metadata(scheduled_step(output, self._prompts))
        looks = [] if self._looks is None else self._looks.take()
        given_up, self._given_up = self._given_up, []
        forgets, self._forgets = self._forgets, False
        return encoded(Instructions(plan, looks, given_up, forgets))

    def learn(self, messages: Sequence[bytes]) -> None:
        """What workers did, from the wire."""
        for each in map(news, messages):
            self.inventory.apply(each.rank, each.changes)
            if self._looks is not None:
                self._looks.answered(each.rank, each.looked)
            if not each.is_starting:
                self._starting_ranks.discard(each.rank)
            (self._busy_ranks.add if each.is_busy else self._busy_ranks.discard)(each.rank)
            self.leader.update(self._reports.add(each.rank, each.report))

    def still_to_free(self, loaded: Iterable[str], stored: Iterable[str]) -> set[str]:
        """Of the requests that all workers name as stored, those that vLLM is still to free.

        Where steps overlap it may have finished one that is named as loaded: it frees it at that,
        and would stumble over its being named once more.
        """
        self._awaited.difference_update(loaded)
        freed = self._awaited.intersection(stored)
        self._awaited -= freed
        return freed

    def has_work(self, now_s: float) -> bool:
        """Whether steps are wanted although no request is there: for blocks on their way down, and
        for those to be forgotten.
        """
        return self._forgets or (bool(self._busy_ranks) and now_s < self._quiet_since_s + QUIET_S)

    def take_counted(self) -> Values:
        """What was counted since the last call."""
        return self._told.increases(of_scheduler(self))

    # ── How ──────────────────────────────────────────────────────────────────────────────────────

    def _is_too_soon(self, now_s: float) -> bool:
        """Whether the first request came less than a moment ago: what a former life left is to be
        known by then, and what is not is no reason to wait.
        """
        if self._first_s is None:
            self._first_s = now_s
        return now_s < self._first_s + START_S

    def _naming(self, weights: str = "") -> Naming:
        return Naming(self._secret, f"{self._model}/{weights}" if weights else self._model)

    def _is_looked_for(self, key: str, known_tokens: int, now_s: float) -> bool:
        """Whether workers are still looking for what nobody here knows of. If so, what is known is
        staged anew with what they find.
        """
        if self._looks is None or not self.slots.has_slot(key):
            return False
        slot = self.slots.get_slot(key)
        end = (len(slot.sequence) - 1) // self._block_size
        names = slot.names(end)[known_tokens // self._block_size : end]
        if slot.failed_blocks or not names or not self._looks.ask(key, names, now_s):
            return False
        if slot.state is SlotState.ONBOARD_STAGED:
            slot.preempt(self.leader.iteration)
        return True
