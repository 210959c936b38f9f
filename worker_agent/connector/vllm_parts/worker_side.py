"""The connector in a worker of vLLM: the layout of its KV tensors, its tiers and transfers.

The connector in a worker of vLLM: its tiers, and the worker that moves blocks.

    instructions ─▶ begin ─▶ start_load ─▶ … ─▶ end ─▶ finished, load_errors ─▶ news

Each worker has a stack of tiers in its process, because its part of every block is in its memory.
All calls are made on the worker's thread; time is an argument.
"""

from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from itertools import pairwise

from torch import Tensor

from router.protocol.values import SCHEME, Identity, Tier
from router.publisher.batch_order.address import rank_endpoint
from worker_agent.connector.tier_publisher import TierPublisher
from worker_agent.connector.vllm_parts.counters import ReportedCounts, Values, of_worker
from worker_agent.connector.vllm_parts.engine import EngineGeometry, tiers_of
from worker_agent.connector.vllm_parts.messages import Lookup, WorkerEvents, encoded, instructions
from worker_agent.connector.vllm_parts.settings import ConnectorSettings
from worker_agent.connector.worker import FinishedTransfers, register_kv_caches
from worker_agent.layout.config import LayoutConfig
from worker_agent.layout.errors import LayoutError
from worker_agent.layout.groups import LayoutGroup
from worker_agent.layout.strides import LayoutKind
from worker_agent.manager.manager import KvBlockManager
from worker_agent.transfer.block_tier import BlockTier


def distinct(tensors: Mapping[str, Tensor], num_blocks: int) -> dict[str, Tensor]:
    """Return the tensors without those over the same memory as an earlier one, by address.

    Layers of several KV cache groups share memory, of which a block belongs to one group at a time.
    Kernels may use smaller blocks than the engine: the first dimension is then a multiple. Raises
    LayoutError for tensors that share a part of their memory.
    """
    found: dict[int, tuple[str, Tensor]] = {}
    whole = {layer: _in_whole_blocks(each, num_blocks) for layer, each in tensors.items()}
    for layer, tensor in whole.items():
        first, same = found.setdefault(tensor.data_ptr(), (layer, tensor))
        if _place(same) != _place(tensor):
            raise _shares_a_part(layer, first)
    ordered = [found[address] for address in sorted(found)]
    for (first, before), (layer, tensor) in pairwise(ordered):
        if before.data_ptr() + before.nbytes > tensor.data_ptr():
            raise _shares_a_part(layer, first)
    return whole if len(found) == len(tensors) else dict(ordered)


def _in_whole_blocks(tensor: Tensor, num_blocks: int) -> Tensor:
    parts, odd = divmod(tensor.shape[0], num_blocks)
    is_split = parts > 1 and not odd and tensor.is_contiguous()
    return tensor.view(num_blocks, -1) if is_split else tensor


def _shares_a_part(layer: str, other: str) -> LayoutError:
    reason, rule = f"it shares a part of the memory of {other}", "tensors_share_all_or_nothing"
    return LayoutError(layer, reason, "all of it, or none", rule=rule)


def _place(tensor: Tensor) -> tuple[int, int, int]:
    """Return the size of a tensor's memory, that of a block in it, and the distance of blocks."""
    width = tensor.element_size()
    return tensor.nbytes, tensor.nbytes // tensor.shape[0], tensor.stride(0) * width


def layout_groups(
    tensors: Mapping[str, Tensor], num_blocks: int, block_size: int
) -> list[LayoutGroup]:
    """Return groups of layers of equal shape and type, in the order of the layers' names.

    The content of a block is opaque, because kernels choose its layout. Raises LayoutError.
    """
    alike: dict[tuple[tuple[int, ...], int], list[str]] = {}
    for layer, tensor in tensors.items():
        alike.setdefault((tuple(tensor.shape), tensor.element_size()), []).append(layer)
    return [
        _group(f"group {number}", layers, shape, width, (num_blocks, block_size))
        for number, ((shape, width), layers) in enumerate(alike.items())
    ]


def _group(
    name: str, layers: list[str], shape: tuple[int, ...], width: int, counts: tuple[int, int]
) -> LayoutGroup:
    num_blocks, block_size = counts
    kind, outer = _kind(layers[0], shape, num_blocks)
    numbers = 1
    for size in shape[len(kind_dims(kind)) :]:
        numbers *= size
    inner, odd = divmod(numbers, block_size)
    if odd or not inner:
        allowed = f"whole tokens, {block_size} of them in a block"
        raise LayoutError(layers[0], f"shape {list(shape)}", allowed, rule="tensor_shape_mismatch")
    config = LayoutConfig(
        num_blocks, len(layers), outer, block_size, inner, dtype_width_bytes=width
    )
    return LayoutGroup(name, tuple(layers), config, kind)


def kind_dims(kind: LayoutKind) -> tuple[str, ...]:
    """Return the dimensions of a layer's tensor that precede a block's content."""
    return ("block",) if kind is LayoutKind.BLOCK_FIRST else ("outer", "block")


def _kind(layer: str, shape: tuple[int, ...], num_blocks: int) -> tuple[LayoutKind, int]:
    is_first = shape[:1] == (num_blocks,)
    is_second = shape[:2] == (2, num_blocks)
    if is_first == is_second:
        reason = f"shape {list(shape)} fits {'both' if is_first else 'none'}"
        allowed = f"[{num_blocks} blocks, …] or [2, {num_blocks} blocks, …]"
        raise LayoutError(layer, reason, allowed, rule="layout_is_ambiguous")
    return (LayoutKind.BLOCK_FIRST, 1) if is_first else (LayoutKind.BLOCK_SECOND, 2)


class WorkerSide:
    """The half in one worker. Closing it ends its transfers and releases all memory."""

    __slots__ = (
        "_events",
        "_looked",
        "_looks",
        "_rank",
        "_reported",
        "given_up",
        "manager",
        "worker",
    )

    def __init__(
        self, settings: ConnectorSettings, facts: EngineGeometry, tensors: Mapping[str, Tensor]
    ) -> None:
        """Open the tiers over the engine's own tensors.

        Raises LayoutError for a tensor of unknown layout, and ConfigError or StorageError if the
        tiers cannot be opened.
        """
        tensors = distinct(tensors, facts.num_blocks)
        groups = layout_groups(tensors, facts.num_blocks, facts.block_size)
        block_bytes = sum(group.config.block_bytes for group in groups)
        self._rank = facts.rank
        self._looks: dict[int, Future[int]] = {}
        self._looked: list[int] = []
        self._reported = ReportedCounts()
        self.given_up = 0
        """Number of requests of which the leader withdrew the loads."""
        self.manager = KvBlockManager(tiers_of(settings, facts, block_bytes))
        self._events: TierPublisher | None = None
        try:
            if settings.tier_events and not facts.rank:  # The other ranks hold the same.
                self._events = _events(settings.tier_events, facts)
            agent, timeout_s = f"{settings.worker.id}", settings.tiers.onboard_timeout_s
            stack = self.manager.stack
            self.worker = register_kv_caches(agent, stack, tensors, groups, timeout_s)
        except BaseException:
            self.close()
            raise

    def void(self, message: bytes) -> None:
        """Give up transfers before the engine overwrites their blocks; may be repeated."""
        self.worker.void(instructions(message).plan.voided)

    def begin(self, message: bytes) -> None:
        """Begin a step with its instructions. Raises InvalidFieldError if it is out of order."""
        received = instructions(message)
        # Blocks found by a finished lookup are reported with this step's changes at the latest.
        self._looked += [number for number, answer in self._looks.items() if answer.done()]
        for number in self._looked:
            self._looks.pop(number, None)
        if received.forgets:
            self.manager.stack.clear(is_shared_kept=True)
        self.worker.bind(received.plan)
        for look in received.looks:
            self._look(look)
        for each in received.given_up:
            self.given_up += 1
            self.worker.give_up_load(each.key, each.blocks)

    def finished(self, keys: Iterable[str], now_s: float) -> FinishedTransfers:
        """Finish requests, and return those with transfers that ended since the last call."""
        return self.worker.get_finished(keys, now_s)

    def take_events(self) -> bytes:
        """Encode the results since the last call."""
        looked, self._looked = self._looked, []
        is_busy = self.worker.under_way > 0 or self.manager.stack.is_storing
        report, changes = self.worker.take_report(), self.worker.take_changes()
        if self._events is not None:
            self._events.publish(changes)
        is_starting = not self.manager.stack.is_probed  # The probe follows the recovery.
        return encoded(WorkerEvents(self._rank, report, changes, looked, is_busy, is_starting))

    def take_counted(self) -> Values:
        """Return the changes of the counters since the last call."""
        tiers, is_first = self.manager.stack.status(), not self._rank
        counted = of_worker(
            self.worker.counters, self.given_up, self._events, tiers, is_first=is_first
        )
        return self._reported.increases(counted)

    def close(self) -> None:
        """Close the tiers. Blocking; calling it again has no effect."""
        if self._events is not None:
            self._events.close()
        self.manager.close()

    def _look(self, look: Lookup) -> None:
        from worker_agent.manager.tiers import found_in  # Imported only if there is a shared tier.

        def find(tier: BlockTier) -> int:
            return found_in(tier, look.names)

        self._looks[look.number] = self.manager.stack.call(Tier.REMOTE, find)


def _events(address: str, facts: EngineGeometry) -> TierPublisher:
    """Return a publisher of tier events. Raises PeerError, ConfigError for a bad address."""
    of_rank = rank_endpoint(address, facts.dp_rank, "tier_events")
    return TierPublisher(of_rank, Identity(SCHEME, facts.block_size), facts.dp_rank)
