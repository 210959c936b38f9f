"""The connector in a worker of vLLM: the layout of its KV tensors, its tiers and transfers.

The connector in a worker of vLLM: its tiers, and the worker that moves blocks.

    instructions ─▶ begin ─▶ start_load ─▶ … ─▶ end ─▶ finished, load_errors ─▶ news

Each worker has a stack of tiers in its process, because its part of every block is in its memory.
All calls are made on the worker's thread; time is an argument.
"""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from itertools import pairwise

from torch import Tensor

from router.errors import ConfigError, InvalidFieldError
from router.protocol.values import SCHEME, Identity, Tier
from router.publisher.batch_order.address import rank_endpoint
from router.sequence.hashing.keyed_hashes import HashKeying
from worker_agent.blocks.descriptors import PeerSource
from worker_agent.config.sharing import rank_address
from worker_agent.connector.control_socket import ControlSocket
from worker_agent.connector.tier_publisher import TierPublisher
from worker_agent.connector.vllm_parts.counters import ReportedCounts, Values, of_worker
from worker_agent.connector.vllm_parts.engine import EngineGeometry, tiers_of
from worker_agent.connector.vllm_parts.messages import (
    Looked,
    Lookup,
    WorkerEvents,
    encoded,
    instructions,
)
from worker_agent.connector.vllm_parts.peer_sharing import NO_PEERS, PeerSharing
from worker_agent.connector.vllm_parts.settings import ConnectorSettings
from worker_agent.connector.worker import FinishedTransfers, register_kv_caches
from worker_agent.layout.config import LayoutConfig
from worker_agent.layout.errors import LayoutError
from worker_agent.layout.groups import LayoutGroup
from worker_agent.layout.strides import LayoutKind
from worker_agent.manager.control import ControlledRank, TierControl
from worker_agent.manager.manager import KvBlockManager
from worker_agent.operations.messages import BlocksetsQuery, PeerCommand, PeersNamed
from worker_agent.sharing.errors import PeerError
from worker_agent.sharing.peer_finder import PeerFinder
from worker_agent.sharing.reports import RankBlocksets
from worker_agent.tiers.stack import TierStack
from worker_agent.transfer.block_tier import BlockTier


def distinct(tensors: Mapping[str, Tensor], num_blocks: int) -> dict[str, Tensor]:
    """Return the tensors without those over the same memory as an earlier one, in their order.

    The order is that of a block's bytes, which other processes read: it must not depend on
    addresses. Layers of several KV cache groups share memory, of which a block belongs to one group
    at a time. Kernels may use smaller blocks than the engine: the first dimension is then a
    multiple. Raises LayoutError for tensors that share a part of their memory.
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
    return dict(found.values())


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


class _Lookups:
    """Lookups in progress, in the shared store and at peers, as far as there are any.

    Invariant: a lookup is finished once both have answered.
    """

    __slots__ = ("_at_peers", "_finder", "_finished", "_in_store", "_stack")

    def __init__(self, stack: TierStack, finder: PeerFinder | None) -> None:
        self._stack = stack
        self._finder = finder
        self._in_store: dict[int, Future[int] | None] = {}
        self._at_peers: dict[int, list[int]] = {}
        self._finished: list[Looked] = []

    def start(self, look: Lookup) -> None:
        """Start a lookup."""
        self._in_store[look.number] = self._asked_in_store(look)
        if self._finder is None:
            self._at_peers[look.number] = []
        else:
            self._finder.ask(look.number, [each.identity for each in look.names], look.source)

    def note_finished(self) -> None:
        """Note the finished ones, at the beginning of a step.

        Blocks found in the store are then reported with this step's changes at the latest.
        """
        if self._finder is not None:
            self._at_peers.update(self._finder.take_answers())
        for number, in_store in list(self._in_store.items()):
            if number in self._at_peers and (in_store is None or in_store.done()):
                del self._in_store[number]
                self._finished.append(Looked(number, self._at_peers.pop(number)))

    def take_finished(self) -> list[Looked]:
        """Return those noted as finished since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def source_of(self, identities: Sequence[bytes]) -> PeerSource | None:
        """Return the peer to load these blocks from; None if none of them was found at one."""
        return None if self._finder is None else self._finder.source_of(identities)

    def _asked_in_store(self, look: Lookup) -> "Future[int] | None":
        if self._stack.store_of(Tier.REMOTE) is None:
            return None
        from worker_agent.manager.tiers import found_in  # Imported only if there is a shared tier.

        def find(tier: BlockTier) -> int:
            return found_in(tier, look.names)

        return self._stack.call(Tier.REMOTE, find)


class WorkerSide:
    """The half in one worker. Closing it ends its transfers and releases all memory."""

    __slots__ = (
        "_control",
        "_events",
        "_layers",
        "_lookups",
        "_peers",
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
        self._layers = frozenset(tensors) if settings.layer_by_layer else frozenset()
        """The layers that are copied one by one."""
        self._rank = facts.rank
        self._reported = ReportedCounts()
        self.given_up = 0
        """Number of requests of which the leader withdrew the loads."""
        config = tiers_of(settings, facts, block_bytes)
        self.manager = KvBlockManager(config)
        self._events: TierPublisher | None = None
        self._peers: PeerSharing | None = None
        self._control: ControlSocket | None = None
        try:
            if settings.share_listen or settings.peers:
                self._peers = PeerSharing(settings, facts, self.manager, config.model)
            if settings.tier_events and not facts.rank:  # The other ranks hold the same.
                self._events = _events(settings.tier_events, facts)
            agent, timeout_s = f"{settings.worker.id}", settings.tiers.onboard_timeout_s
            stack = self.manager.stack
            finder = None if self._peers is None else self._peers.finder
            self._lookups = _Lookups(stack, finder)
            self.worker = register_kv_caches(
                agent,
                stack,
                tensors,
                groups,
                timeout_s,
                source_of=self._lookups.source_of,
                is_layered=settings.layer_by_layer,
            )
            if settings.control_listen:
                self._control = self._controlled(settings, facts)
        except BaseException:
            self.close()
            raise

    def _controlled(self, settings: ConnectorSettings, facts: EngineGeometry) -> ControlSocket:
        address = rank_address("control_listen", settings.control_listen, facts.number)
        ranks = {facts.dp_rank: ControlledRank(self.manager, _not_awaited)}
        control = TierControl(settings.worker.id, HashKeying(settings.block_keys.read()), ranks)
        try:
            return ControlSocket(address, control, self._answer_peers)
        except PeerError as error:
            raise ConfigError("control_listen", str(error), "an address to listen at") from error

    def _answer_peers(self, command: PeerCommand) -> PeersNamed | RankBlocksets:
        """Execute a command about other engines. Raises InvalidFieldError."""
        if self._peers is not None:
            return self._peers.answer(command)
        if isinstance(command, BlocksetsQuery):
            return RankBlocksets()
        raise InvalidFieldError("addresses", "nothing is shared here", "with share_listen")

    def void(self, message: bytes) -> None:
        """Give up transfers before the engine overwrites their blocks; may be repeated."""
        plan = instructions(message).plan
        self.worker.void(plan.voided, is_preempting=plan.is_preempting)

    def begin(self, message: bytes) -> None:
        """Begin a step with its instructions. Raises InvalidFieldError if it is out of order."""
        received = instructions(message)
        self._lookups.note_finished()
        if received.forgets:
            self.manager.stack.clear(is_shared_kept=True)
        self.worker.bind(received.plan)
        for look in received.looks:
            self._lookups.start(look)
        for each in received.given_up:
            self.given_up += 1
            self.worker.give_up_load(each.key, each.blocks)

    def wait_for_layer(self, name: str) -> None:
        """Let the engine compute a layer once it is loaded.

        Layers without blocks of their own, which read another's, need no wait.
        """
        if name in self._layers:
            self.worker.wait_for_layer(name)

    def save_layer(self, name: str) -> None:
        """Begin to store a layer that the engine has computed."""
        if name in self._layers:
            self.worker.save_layer(name)

    def finished(self, keys: Iterable[str], now_s: float) -> FinishedTransfers:
        """Finish requests, and return those with transfers that ended since the last call."""
        return self.worker.get_finished(keys, now_s)

    def take_events(self) -> bytes:
        """Encode the results since the last call."""
        looked = self._lookups.take_finished()
        is_busy = self.worker.under_way > 0 or self.manager.stack.is_storing
        report, changes = self.worker.take_report(), self.worker.take_changes()
        if self._events is not None:
            self._events.publish(changes)
        is_starting = not self.manager.stack.is_probed  # The probe follows the recovery.
        return encoded(WorkerEvents(self._rank, report, changes, looked, is_busy, is_starting))

    def take_counted(self) -> Values:
        """Return the changes of the counters since the last call."""
        tiers, is_first = self.manager.stack.status(), not self._rank
        peers = NO_PEERS if self._peers is None else self._peers.counts
        counted = of_worker(
            self.worker.counters, self.given_up, self._events, tiers, peers, is_first=is_first
        )
        return self._reported.increases(counted)

    def close(self) -> None:
        """Close the tiers. Blocking; calling it again has no effect."""
        if self._control is not None:
            self._control.close()
        if self._events is not None:
            self._events.close()
        if self._peers is not None:
            self._peers.close()
        self.manager.close()


def _not_awaited() -> None:
    """Do nothing: changes of the tiers are reported in the engine's next step."""


def _events(address: str, facts: EngineGeometry) -> TierPublisher:
    """Return a publisher of tier events. Raises PeerError, ConfigError for a bad address."""
    of_rank = rank_endpoint(address, facts.dp_rank, "tier_events")
    return TierPublisher(of_rank, Identity(SCHEME, facts.block_size), facts.dp_rank)
