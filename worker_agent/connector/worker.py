"""The connector in the engine's worker: executes the leader's plans and reports the results.

    engine's step:  bind ─▶ start_load ─▶ (wait_for_layer, save_layer) ×layers ─▶ end_step
                         ─▶ get_finished ─▶ take_load_errors ─▶ take_report

All transfers are asynchronous: the engine computes a request after `get_finished` has returned it.
Layer by layer, a request is returned when its blocks are in host memory, and each layer begins
after its part of the copy; stores of the step are copied as its layers are computed. All calls are
made on one thread; time is an argument.
"""

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct
from torch import Tensor

from router.errors import InvalidFieldError
from worker_agent.connector.device_memory import DeviceMemory
from worker_agent.connector.mover import SourceOf, StackMover
from worker_agent.connector.slots.errors import RequestKey
from worker_agent.connector.slots.in_flight import InFlightTransfers
from worker_agent.connector.slots.progress import Progress
from worker_agent.connector.slots.protocol import (
    Completion,
    LeaderTransferRequest,
    Operation,
    SchedulingDecision,
    StepPlan,
    StepReport,
    TransferKind,
    WorkerTransferRequest,
    failed,
)
from worker_agent.connector.slots.rank_reports import WorkerCounters
from worker_agent.connector.slots.scheduler import TransferScheduler
from worker_agent.layout.errors import LayoutError
from worker_agent.layout.groups import LayoutGroup
from worker_agent.tiers.stack import TierChange, TierStack
from worker_agent.transfer.copy_stream import CopyDevice

LINGER_S = 1.0
"""Longest time that a finished request's blocks wait to be stored and cannot be reused."""


class FinishedTransfers(Struct, frozen=True):
    """Requests with completed transfers.

    `stored`: the engine may free their blocks. `loaded`: their loads are over. `failed`: those of
    the latter of which a block was not loaded.
    """

    stored: set[RequestKey]
    loaded: set[RequestKey]
    failed: set[RequestKey]


class ConnectorWorker:
    """The worker half of a connector.

    Invariant: a request that the leader announced is returned by `get_finished` once it is over, at
    most `LINGER_S` later, and then forgotten; no transfer accesses its blocks after that.
    """

    __slots__ = (
        "_completions",
        "_failed",
        "_finished_s",
        "_is_decoding",
        "_layers",
        "_load_errors",
        "_loaded",
        "_mover",
        "_num_blocks",
        "_scheduler",
        "_stored",
        "_under_way",
        "counters",
    )

    def __init__(
        self,
        stack: TierStack,
        device: DeviceMemory,
        load_timeout_s: float,
        source_of: SourceOf | None = None,
        *,
        is_layered: bool = False,
    ) -> None:
        """Create the worker. `load_timeout_s`: blocks not loaded by then have failed."""
        self._layers = {name: place for place, name in enumerate(device.layers)}
        self.counters = WorkerCounters()
        self._num_blocks = device.num_blocks
        self._mover = StackMover(stack, device, load_timeout_s, source_of, is_layered=is_layered)
        self._scheduler = TransferScheduler(Progress(device.layers))
        self._under_way = InFlightTransfers()
        self._finished_s: dict[RequestKey, float] = {}
        self._loaded: set[RequestKey] = set()
        self._failed: set[RequestKey] = set()
        self._load_errors: set[int] = set()
        self._completions: list[Completion] = []
        self._stored: list[RequestKey] = []
        self._is_decoding = False

    @property
    def under_way(self) -> int:
        """Number of transfers in progress."""
        return len(self._under_way)

    # ── A step ───────────────────────────────────────────────────────────────────────────────────

    def void(self, uuids: Iterable[int], *, is_preempting: bool = False) -> None:
        """Give up transfers before the engine overwrites their blocks; may be repeated.

        `is_preempting`: it may overwrite blocks that are loaded, but not awaited yet.
        """
        if is_preempting:
            self._mover.await_loads()
        for uuid in uuids:
            self.counters.voided += self._give_up(uuid, "voided")
        self._take_completions()

    def bind(self, plan: StepPlan) -> None:
        """Begin a step with the leader's plan. Raises InvalidFieldError if it is out of order.

        If the previous step never ended, it may have computed nothing: none of its blocks is
        stored.
        """
        is_after_end = self._scheduler.progress.is_over
        self._scheduler.progress.begin(plan.iteration)
        if not is_after_end:
            self._cancel_stores()
            self._mover.end_layers()
        self._is_decoding = plan.is_decoding
        self.void(plan.voided, is_preempting=plan.is_preempting)
        for each in plan.new_slots:
            if self._scheduler.has_slot(each.key):
                self._scheduler.expect(each.key, each.immediate)
            else:
                self._scheduler.create_slot(each.key, each.immediate)
                self._under_way.follow(each.key)
        for operation in plan.operations:
            self._take_on(operation)

    def give_up_load(self, key: RequestKey, blocks: Iterable[int]) -> None:
        """Report a load as failed that the engine waits for although no plan contains it."""
        self._load_errors.update(blocks)
        self._loaded.add(key)
        self._failed.add(key)

    def start_load(self, now_s: float) -> None:
        """Begin the transfers without a requirement."""
        self._run_decided(now_s)
        if self._mover.is_layered:
            stores = map(self._under_way.get, self._scheduler.undecided)
            self._mover.begin_layers([each for each in stores if each is not None], now_s)

    def wait_for_layer(self, name: str) -> None:
        """Let the engine compute this layer once what was loaded is in its blocks.

        Returns at once. Raises InvalidFieldError if the layer is not registered.
        """
        self._scheduler.progress.check_layer(name)
        self._mover.await_layer(self._layers[name])

    def save_layer(self, name: str) -> None:
        """Mark a layer as computed, and begin to store it. Raises InvalidFieldError."""
        self._scheduler.progress.complete_layer(name)
        self.counters.saved_layers += 1
        self._mover.save_layer(self._layers[name])
        self._scheduler.advance()

    def end_step(self, now_s: float) -> None:
        """End the forward pass, if one is running, and begin the stores unless a load failed."""
        self._mover.await_loads()
        self._mover.poll(now_s, is_decoding=self._is_decoding)
        self._take_completions()
        if self._load_errors:
            self._cancel_stores()
        self._scheduler.progress.end()
        self._scheduler.advance()
        self._run_decided(now_s)

    def get_finished(self, finished: Iterable[RequestKey], now_s: float) -> FinishedTransfers:
        """Finish requests, and return those with transfers that ended since the last call.

        Each request is returned once as stored, and at most once as loaded for each load.
        """
        if not self._scheduler.progress.is_over:
            self.end_step(now_s)
        for key in finished:
            self._finish(key, now_s)
        stored = {key for key in list(self._finished_s) if self._is_stored(key, now_s)}
        self._stored += stored
        self._mover.await_loads(stored)  # The engine may reuse their blocks.
        loaded, self._loaded = self._loaded - stored, set()
        failed = self._failed & loaded
        self._failed -= failed | stored
        return FinishedTransfers(stored, loaded, failed)

    def take_load_errors(self) -> set[int]:
        """Return the engine's blocks that loads failed to fill since the last call."""
        errors, self._load_errors = self._load_errors, set()
        return errors

    def take_report(self) -> StepReport:
        """Return the results since the last call, for the leader."""
        completions, self._completions = self._completions, []
        stored, self._stored = self._stored, []
        return StepReport(completions, stored)

    def take_changes(self) -> list[TierChange]:
        """Return the changes of names in the lower tiers since the last call."""
        changes, self._mover.changes = self._mover.changes, []
        return changes

    # ── How ──────────────────────────────────────────────────────────────────────────────────────

    def _take_on(self, operation: Operation) -> None:
        key, uuid = operation.key, operation.uuid
        if not self._is_fit(operation) or not self._under_way.add(operation):
            self.counters.refused += 1
            if self._under_way.get(uuid) is None:
                self._completions.append(failed(operation, "refused"))
            return
        request_type, after = operation.request_type, operation.requirement
        known = WorkerTransferRequest(key, uuid, operation.kind, request_type)
        self._scheduler.request_from_worker(known)
        ready = LeaderTransferRequest(key, uuid, request_type, after)
        self._scheduler.request_from_leader(ready)

    def _is_fit(self, operation: Operation) -> bool:
        blocks = operation.blocks
        return 0 < len(blocks) == len(operation.names) == len(set(blocks)) and (
            0 <= min(blocks) <= max(blocks) < self._num_blocks
        )

    def _run_decided(self, now_s: float) -> None:
        for decided in self._scheduler.take_decisions():
            operation = self._under_way.get(decided.uuid)
            if operation is None:
                continue
            if decided.decision is SchedulingDecision.CANCEL:
                self._complete(failed(operation, "cancelled"))
            elif operation.kind is TransferKind.LOAD:
                self._mover.load(operation, now_s)
            else:
                self._mover.store(operation)
        self._mover.end_layers()
        self._mover.gather_due(now_s)
        self._take_completions()

    def _cancel_stores(self) -> None:
        """Cancel this step's stores: their blocks may depend on blocks that were not loaded."""
        stores = self._under_way.stores()
        self.counters.cancelled_stores += sum(self._scheduler.cancel(uuid) for uuid in stores)

    def _finish(self, key: RequestKey, now_s: float) -> None:
        if key not in self._under_way:
            self.counters.unknown_finished += 1
            return
        self._finished_s.setdefault(key, now_s)
        for uuid in self._under_way.of(key, TransferKind.LOAD):
            self._give_up(uuid, "cancelled")
        self._take_completions()

    def _is_stored(self, key: RequestKey, now_s: float) -> bool:
        """Return whether the request has no transfers left, or is late."""
        is_late = now_s >= self._finished_s[key] + LINGER_S
        for uuid in self._under_way.of(key):
            if is_late:
                self._give_up(uuid, "not stored in time")
            else:
                self._mover.drop_cancelled(uuid)
        self._take_completions()
        if not (is_late or self._scheduler.is_complete(key)):
            return False
        self._scheduler.forget(key)
        self._under_way.forget(key)
        del self._finished_s[key]
        return True

    def _give_up(self, uuid: int, reason: str) -> bool:
        """Give up a transfer in any state; return False if it is already over."""
        operation = self._under_way.get(uuid)
        if operation is None:
            return False
        if not self._mover.give_up(uuid, reason):
            self._scheduler.cancel(uuid)
            self._complete(failed(operation, reason))
        return True

    def _take_completions(self) -> None:
        for completion in self._mover.take_completions():
            self._complete(completion)

    def _complete(self, completion: Completion) -> None:
        operation = self._under_way.pop(completion.uuid)
        key = operation.key
        self._scheduler.completed(key, completion.uuid)
        self._completions.append(completion)
        if operation.kind is TransferKind.LOAD and key not in self._finished_s:
            self._note_loaded(operation, completion)

    def _note_loaded(self, operation: Operation, completion: Completion) -> None:
        self.counters.failed_loads += len(completion.errors)
        self._load_errors.update(operation.blocks[place] for place in completion.errors)
        if completion.errors:
            self._failed.add(operation.key)
        if not self._under_way.of(operation.key, TransferKind.LOAD):
            self._loaded.add(operation.key)


def register_kv_caches(
    agent: str,
    stack: TierStack,
    tensors: Mapping[str, Tensor],
    groups: Sequence[LayoutGroup],
    load_timeout_s: float,
    copy_device: CopyDevice | None = None,
    source_of: SourceOf | None = None,
    *,
    is_layered: bool = False,
) -> ConnectorWorker:
    """Return a worker over the engine's own tensors, with the layout that `groups` state.

    `copy_device`: the order of copies and computation; None derives it from the tensors.
    `source_of`, `is_layered`: see `StackMover`. Raises LayoutError if a tensor differs, and
    InvalidFieldError if the size of a block differs from the tiers'.
    """
    device = DeviceMemory(agent, tensors, groups, copy_device)
    if device.block_bytes != stack.block_bytes:
        reason = f"blocks of {device.block_bytes} bytes"
        raise InvalidFieldError("groups", reason, f"{stack.block_bytes}, the size in the tiers")
    if is_layered and not device.has_layers_apart:
        reason, rule = "all layers in one tensor", "layers_must_be_separate"
        raise LayoutError("groups", reason, "a tensor for each layer", rule=rule)
    return ConnectorWorker(stack, device, load_timeout_s, source_of, is_layered=is_layered)
