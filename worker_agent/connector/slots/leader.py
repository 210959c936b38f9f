"""The connector in the engine's scheduler: decides which blocks to load and to store.

    a request waits ─▶ get_num_new_matched_tokens ─▶ update_state_after_alloc
    every step      ─▶ build_connector_metadata ─▶ StepPlan ─▶ worker ─▶ StepReport ─▶ update
    a request ends  ─▶ request_finished

Never raises into the engine: a request that it cannot follow is computed without it, and counted.
Source: the leader of Dynamo's connectors, and vLLM's `KVConnectorBase_V1`.
"""

from collections.abc import Iterable, Sequence

from msgspec import Struct

from worker_agent.connector.slots.errors import RequestKey, SlotError, SlotOperationError
from worker_agent.connector.slots.protocol import (
    CachedRequest,
    EngineRequest,
    Matched,
    NewRequest,
    NewSlot,
    Operation,
    ScheduledStep,
    StepPlan,
    StepReport,
)
from worker_agent.connector.slots.rank_reports import LeaderCounters
from worker_agent.connector.slots.slot import Slot
from worker_agent.connector.slots.slot_blocks import BlockTables
from worker_agent.connector.slots.slot_manager import SlotManager
from worker_agent.connector.slots.slot_table import SlotState


class IssuedTransfers:
    """Requests and transfers sent to the worker.

    Invariant: the worker follows exactly the requests sent, until it reports that it does not.

    Transfers that are not waited for any more are voided by the next plan, before the worker
    accesses a block, because the engine may overwrite their blocks.
    """

    __slots__ = ("_issued", "_keys", "_voided")

    def __init__(self) -> None:
        self._keys: dict[int, RequestKey] = {}
        self._issued: set[RequestKey] = set()
        self._voided: list[int] = []

    def __contains__(self, key: RequestKey) -> bool:
        """Return whether the worker follows this request, and will therefore report it."""
        return key in self._issued

    def plan(self, iteration: int, slots: Sequence[Slot], *, is_preempting: bool) -> StepPlan:
        """Return the plan of an iteration with the operations of these slots, in order."""
        new_slots: list[NewSlot] = []
        operations: list[Operation] = []
        is_decoding = False
        for slot in slots:
            is_decoding = is_decoding or slot.state is SlotState.DECODING
            taken = slot.take_pending_operations()
            if taken:
                self._issue(slot.key, taken, new_slots)
                operations += taken
        voided, self._voided = self._voided, []
        return StepPlan(iteration, new_slots, operations, is_decoding, voided, is_preempting)

    def void(self, uuids: Iterable[int]) -> None:
        """Add transfers to void: their results must be discarded."""
        self._voided += uuids

    def answered(self, uuid: int) -> RequestKey | None:
        """Remove a completed transfer and return its request. Returns None if it is unknown."""
        return self._keys.pop(uuid, None)

    def over(self, key: RequestKey) -> None:
        """Remove a request that the worker no longer follows."""
        self._issued.discard(key)

    def gone(self) -> None:
        """Forget everything sent: the worker is gone, and its successor knows nothing."""
        self._keys.clear()
        self._issued.clear()
        self._voided.clear()

    def _issue(self, key: RequestKey, taken: list[Operation], new_slots: list[NewSlot]) -> None:
        immediate = sum(1 for each in taken if each.requirement is None)
        if immediate or key not in self._issued:
            new_slots.append(NewSlot(key, immediate))
        self._issued.add(key)
        self._keys.update((each.uuid, key) for each in taken)


_NOTHING = Matched(0, is_async=False)
_COMPUTING = frozenset({SlotState.NOT_SCHEDULED, SlotState.PREFILLING, SlotState.DECODING})


class LostLoad(Struct, frozen=True):
    """Blocks that a lost load may still write; it is not waited for any more."""

    key: RequestKey
    blocks: Sequence[int]


class ConnectorLeader:
    """The scheduler half of a connector. Calls take the lock of `slots`; time is an argument.

    Invariant: `request_finished` returns True exactly if the worker knows the request, and will
    therefore report it as stored.
    """

    __slots__ = ("_onboarding", "_running", "_slots", "_worker", "counters", "iteration", "refusal")

    def __init__(self, slots: SlotManager) -> None:
        self.iteration = 0
        self.counters = LeaderCounters()
        self.refusal: SlotError | None = None
        """The last error that led to a refusal."""
        self._slots = slots
        self._onboarding: dict[RequestKey, None] = {}
        self._running: set[RequestKey] = set()
        self._worker = IssuedTransfers()

    @property
    def quarantined_blocks(self) -> int:
        """Number of the engine's blocks that a lost transfer may still access."""
        return len(self._slots.quarantine)

    # ── A request waits ──────────────────────────────────────────────────────────────────────────

    def get_num_new_matched_tokens(self, request: EngineRequest, num_computed: int) -> Matched:
        """Return how many tokens lower tiers have after the engine's. O(tokens) for a new request.

        The engine may repeat the call; the result is the same if nothing has changed.
        """
        with self._slots.lock:
            try:
                slot = self._waiting(request, num_computed)
                if slot is None:
                    return _NOTHING
                slot.acquire_all_local_matches(num_computed)
            except SlotError as error:
                self._refuse(error)
                return _NOTHING
            tokens = slot.staged_tokens
            return Matched(tokens, is_async=True) if tokens else _NOTHING

    def update_state_after_alloc(
        self, key: RequestKey, blocks: BlockTables, num_external_tokens: int, now_s: float
    ) -> None:
        """Record the engine's blocks of a request, and load `num_external_tokens` tokens.

        `blocks`: all blocks that the request has, of each KV cache group.
        """
        with self._slots.lock:
            try:
                slot = self._slots.get_slot(key)
                slot.extend_device_blocks(blocks)
                if num_external_tokens:
                    self._onboard(slot, num_external_tokens, now_s)
            except SlotError as error:
                self._refuse(error)

    # ── A step ───────────────────────────────────────────────────────────────────────────────────

    def build_connector_metadata(self, step: ScheduledStep) -> StepPlan:
        """Return the worker's plan for this step. O(requests)."""
        with self._slots.lock:
            self.iteration += 1
            for key in step.preempted:
                self._preempt(key)
            slots = [self._slots.get_slot(key) for key in self._onboarding]
            self._onboarding.clear()
            slots += [slot for each in step.new_requests if (slot := self._begin(each, step))]
            slots += [slot for each in step.cached_requests if (slot := self._go_on(each, step))]
            self._skip(step)
            is_preempting = bool(step.preempted)
            return self._worker.plan(self.iteration, slots, is_preempting=is_preempting)

    def request_finished(self, key: RequestKey, now_s: float) -> bool:
        """Finish a request; return True if its blocks are freed later, after the worker's report.

        It may be called at any time, and repeatedly.
        """
        with self._slots.lock:
            if self._slots.has_slot(key):
                slot = self._slots.get_slot(key)
                slot.mark_as_finished(self.iteration, now_s)
                self._running.discard(key)
                self._onboarding.pop(key, None)
                self._forget_finished(slot)
            return key in self._worker

    # ── What came of it ──────────────────────────────────────────────────────────────────────────

    def update(self, report: StepReport) -> None:
        """Process a worker's report."""
        with self._slots.lock:
            for completion in report.completions:
                key = self._worker.answered(completion.uuid)
                if key is None or not self._slots.settle(key, completion):
                    self.counters.stray_completions += 1
                elif self._slots.has_slot(key):
                    slot = self._slots.get_slot(key)
                    self._count(slot, len(completion.errors))
                    self._forget_finished(slot)
            for key in report.stored:
                self._close(key)

    def tick(self, now_s: float) -> list[LostLoad]:
        """Expire late transfers, and return the lost loads of requests that are not over.

        The next plan voids the transfers, so that the worker ends them before the next forward
        pass.
        """
        with self._slots.lock:
            late = self._slots.expire(now_s)
            self.counters.lost_transfers += len(late)
            lost = [LostLoad(slot.key, slot.failed_blocks) for slot in late if not slot.is_over]
            for slot in late:
                self._worker.void(self._slots.quarantine.uuids_of(slot.key))
                self._forget_finished(slot)
            return lost

    def worker_is_gone(self) -> None:
        """Abandon all transfers: they ended with the worker, so that all blocks are safe."""
        with self._slots.lock:
            for slot in list(self._slots.slots()):
                slot.abandon()
                self._forget_finished(slot)
            self._slots.quarantine.release_all()
            self._worker.gone()

    # ── How ──────────────────────────────────────────────────────────────────────────────────────

    def _waiting(self, request: EngineRequest, num_computed: int) -> Slot | None:
        """Return the slot of a request without blocks, or None if nothing is to be loaded for it.

        The engine calls this for requests that hold no blocks. A slot that counts as computing was
        therefore preempted, or its loads failed. A load that failed is not tried again.
        """
        if num_computed % self._slots.groups.alignment:
            return None
        if not self._slots.has_slot(request.key):
            return self._slots.create_slot(
                request.key,
                request.tokens,
                lora_name=request.lora_name,
                cache_salt=request.cache_salt,
            )
        slot = self._slots.get_slot(request.key)
        if slot.is_over or (slot.state is SlotState.ONBOARDING and not slot.is_loaded):
            return None
        is_elsewhere = slot.staged_tokens and slot.staged_after_tokens != num_computed
        if slot.state in _COMPUTING or slot.state is SlotState.ONBOARDING or is_elsewhere:
            self._worker.void(slot.preempt(self.iteration))
        return None if slot.failed_blocks else slot

    def _onboard(self, slot: Slot, num_tokens: int, now_s: float) -> None:
        if num_tokens != slot.staged_tokens:
            allowed = f"{slot.staged_tokens}, as matched before"
            raise SlotOperationError(slot.key, "num_external_tokens", f"{num_tokens}", allowed)
        slot.mark_as_onboarding(self.iteration + 1, now_s)
        self.counters.matched_tokens += num_tokens
        self._onboarding[slot.key] = None

    def _preempt(self, key: RequestKey) -> None:
        """Preempt a slot that is computing.

        It no longer is if the engine has queried the request again since, which has reset it, or if
        the request has finished since: the engine has its blocks without the worker's report.
        """
        slot = self._slots.get_slot(key) if self._slots.has_slot(key) else None
        if slot is not None and slot.is_over:
            self._worker.void(each.uuid for each in slot.under_way)
        elif slot is not None and slot.state in _COMPUTING:
            self._worker.void(slot.preempt(self.iteration))
            self._running.discard(key)

    def _begin(self, request: NewRequest, step: ScheduledStep) -> Slot | None:
        try:
            slot = self._slots.get_slot(request.key)
            slot.extend_device_blocks(request.blocks)
            self._compute(slot, request.num_computed_tokens, (), step)
        except SlotError as error:
            self._refuse(error)
            return None
        return slot

    def _go_on(self, request: CachedRequest, step: ScheduledStep) -> Slot | None:
        try:
            slot = self._slots.get_slot(request.key)
            if request.is_resumed:
                self._resume(slot, request.blocks)
            elif request.blocks:
                slot.forget_passed(request.num_computed_tokens)
                slot.append_mutable_device_blocks(request.blocks)
            self._compute(slot, request.num_computed_tokens, request.tokens, step)
        except SlotError as error:
            self._refuse(error)
            return None
        return slot

    def _resume(self, slot: Slot, blocks: BlockTables) -> None:
        if slot.state in _COMPUTING:
            self._worker.void(slot.preempt(self.iteration))
        slot.extend_device_blocks(blocks)

    def _compute(
        self, slot: Slot, num_computed: int, tokens: Sequence[int], step: ScheduledStep
    ) -> None:
        scheduled = step.num_scheduled_tokens.get(slot.key, 0)
        slot.schedule(self.iteration, num_computed, scheduled, tokens)
        self._running.add(slot.key)

    def _skip(self, step: ScheduledStep) -> None:
        for key in self._running.difference(step.num_scheduled_tokens):
            self._slots.get_slot(key).mark_as_not_scheduled(self.iteration)
            self._running.discard(key)

    def _count(self, slot: Slot, failed: int) -> None:
        if slot.state is SlotState.ONBOARDING:
            self.counters.failed_blocks += failed
        else:
            self.counters.unsaved_blocks += failed

    def _forget_finished(self, slot: Slot) -> None:
        if slot.state is SlotState.FINISHED:
            self._slots.remove_slot(slot.key)

    def _close(self, key: RequestKey) -> None:
        """Close a request that the worker has released.

        Its transfers without a completion are abandoned.
        """
        self._worker.over(key)
        self._slots.quarantine.release_of(key)
        if self._slots.has_slot(key):
            slot = self._slots.get_slot(key)
            slot.abandon()
            self._forget_finished(slot)

    def _refuse(self, error: SlotError) -> None:
        self.counters.refused += 1
        self.refusal = error
