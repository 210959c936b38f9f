"""Copies of blocks between the engine's memory and the tiers below it.

    load:   stack ─▶ verified rows on the host ─▶ scatter ─▶ Completion: an error for each other
    store:  offer ─▶ due ─▶ gather ─▶ stack               ─▶ Completion, once none of it waits
    urgent store:           gather ─▶ stack               ─▶ Completion, at once
    by layer:               saved ×layers ─▶ stack        rows ─▶ Completion ─▶ awaited ×layers

Copies are queued on the engine's worker thread, between forward passes, and complete on the device
meanwhile (`transfer/copy_stream.py`). A transfer completes once its copies have; one that is given
up, or is urgent, holds back the engine's later work until its copies are complete. Therefore no
transfer accesses the engine's blocks after its completion, but for a load by layer, whose layers
hold back the engine's.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from msgspec import Struct

from worker_agent.blocks.descriptors import PeerSource
from worker_agent.blocks.names import BlockName
from worker_agent.connector.device_memory import DeviceMemory
from worker_agent.connector.slots.errors import RequestKey
from worker_agent.connector.slots.protocol import Completion, Operation
from worker_agent.offload.queue import Waiting
from worker_agent.tiers.onboarding import Loading
from worker_agent.tiers.stack import TierChange, TierStack
from worker_agent.transfer.copy_stream import DeviceCopy
from worker_agent.transfer.device_copies import STAGING_BLOCKS, LayerGather, LayerScatter

PIECE_BLOCKS = 1024
"""Blocks of a load that are in host memory at a time, if it is useful as a whole only."""


SourceOf: TypeAlias = Callable[[Sequence[bytes]], PeerSource | None]
"""The peer from which blocks, by identity, are loaded that no tier has; None: there is none."""


class _Load(Struct):
    """The part of a load in progress. `first`: the place of its first block in the operation.

    `copy`: the copy into the engine's blocks, once it has begun.
    """

    operation: Operation
    loading: Loading
    first: int
    deadline_s: float
    copy: DeviceCopy | None = None


class _Store(Struct):
    """A store in progress.

    `waiting`: places in the operation of the blocks that are not gathered, by identity. `copy`: the
    last one that reads its blocks; copies complete in order.
    """

    operation: Operation
    waiting: dict[bytes, int]
    copy: DeviceCopy | None = None


class _Gather(Struct, frozen=True):
    """A copy in progress of blocks of these stores."""

    copy: DeviceCopy
    uuids: set[int]


class _LayerStores(Struct, frozen=True):
    """The blocks that are gathered in this step as their layers are computed."""

    gather: LayerGather
    waiting: list[Waiting]


class StackMover:
    """Transfers in progress, by uuid.

    `load_timeout_s`: limit of a load; blocks not loaded by then have failed. `source_of`: None
    without peers. `is_layered`: a load is complete once its rows are on the host, and the engine
    awaits its layers one by one; blocks that are due in the step that fills them are gathered layer
    by layer.
    """

    __slots__ = (
        "_completions",
        "_device",
        "_filling",
        "_gathers",
        "_landing",
        "_loads",
        "_source_of",
        "_stack",
        "_stores",
        "_urgent",
        "_wanted",
        "changes",
        "is_layered",
        "load_timeout_s",
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
        self.load_timeout_s = load_timeout_s
        self.is_layered = is_layered
        self._filling: _LayerStores | None = None
        self._landing: dict[RequestKey, LayerScatter] = {}
        """Scatters of complete loads, of which the engine has not awaited all layers."""
        self.changes: list[TierChange] = []
        """Changes of the tiers that have not been taken."""
        self._stack = stack
        self._device = device
        self._source_of = source_of
        self._loads: dict[int, _Load] = {}
        self._stores: dict[int, _Store] = {}
        self._gathers: deque[_Gather] = deque()
        self._urgent: list[Operation] = []
        self._wanted: dict[bytes, list[int]] = {}
        """Stores that wait for a block, by identity."""
        self._completions: list[Completion] = []

    def load(self, operation: Operation, now_s: float) -> None:
        """Begin a load."""
        self._load_from(operation, 0, now_s, now_s + self.load_timeout_s)

    def store(self, operation: Operation) -> None:
        """Begin a store; one that is urgent ends with the next `gather_due`."""
        if operation.is_urgent:
            self._urgent.append(operation)
            return
        waiting = {name.identity: place for place, name in enumerate(operation.names)}
        self._stores[operation.uuid] = _Store(operation, waiting)
        for identity in waiting:
            self._wanted.setdefault(identity, []).append(operation.uuid)
        filling = () if self._filling is None else self._filling.waiting
        early = {each.name.identity for each in filling}
        names = [name for name in operation.names if name.identity not in early]
        self._stack.offer(names, container=operation.uuid)

    def begin_layers(self, operations: Iterable[Operation], now_s: float) -> None:
        """Begin to gather what these stores of the step name and is due, as layers are saved.

        The rest is gathered after the step.
        """
        blocks: dict[bytes, int] = {}
        for each in operations:
            if not each.is_urgent:
                blocks.update((name.identity, block) for name, block in _moved(each))
                self._stack.offer(each.names, container=each.uuid)
        due = self._stack.due(now_s) if blocks else []
        rest = [each for each in due if each.name.identity in self._wanted]
        filled = [each for each in due if each not in rest and each.name.identity in blocks]
        del filled[STAGING_BLOCKS:]
        if filled:
            gather = self._device.gather_by_layer([blocks[each.name.identity] for each in filled])
            self._filling = _LayerStores(gather, filled)
        if rest:
            self._gather(rest)

    def save_layer(self, layer: int) -> None:
        """Begin to copy a layer that the engine has computed."""
        if self._filling is not None:
            self._filling.gather.save(layer)

    def await_layer(self, layer: int) -> None:
        """Let the engine compute a layer once it is loaded."""
        for each in self._landing.values():
            each.hold_back(layer)

    def await_loads(self, keys: Iterable[RequestKey] | None = None) -> None:
        """Let all that the engine queues from now on begin after loads are in its blocks.

        `keys`: those of these requests; None: all.
        """
        for key in tuple(self._landing if keys is None else keys):
            if landing := self._landing.pop(key, None):
                landing.hold_back()

    def end_layers(self) -> None:
        """Pass blocks whose stores have begun to the tiers, and drop the others."""
        filling, self._filling = self._filling, None
        if filling is None:
            return
        copy = filling.gather.end()
        wanted = [each for each in filling.waiting if each.name.identity in self._wanted]
        if len(wanted) == len(filling.waiting):
            self._gather(wanted, copy)
            return
        copy.hold_back()
        if wanted:
            self._gather(wanted)

    def give_up(self, uuid: int, reason: str) -> bool:
        """End a transfer with the blocks moved so far. Returns False if it is already over.

        What the engine computes from then on begins after the copies that are in progress.
        """
        if uuid in self._loads:
            load = self._loads.pop(uuid)
            load.loading.cancel()
            if load.copy is not None:
                load.copy.hold_back()
            self._complete(load.operation, range(len(load.operation.blocks)), reason)
            return True
        if uuid in self._stores:
            store = self._stores[uuid]
            self._stack.cancel(uuid)
            if store.copy is not None:
                store.copy.hold_back()
            self._end_store(store, reason)
            return True
        return False

    def drop_cancelled(self, uuid: int) -> None:
        """End a store of which no remaining name is queued. O(its blocks).

        Such names are already stored, or were not admitted to the tier.
        """
        store = self._stores.get(uuid)
        if store is None or (store.copy is not None and not store.copy.is_done):
            return
        if not any(self._stack.is_offered(each) for each in store.waiting):
            self._end_store(store, "not stored")

    def poll(self, now_s: float, *, is_decoding: bool) -> None:
        """Process the tiers' results and completed copies, and scatter loaded blocks."""
        self.changes += self._stack.poll(now_s, is_decoding=is_decoding)
        for load in list(self._loads.values()):
            if load.loading.is_done:
                self._land(load, now_s)
        self._end_stored()

    def gather_due(self, now_s: float) -> None:
        """Gather the blocks that are due, each name once for all stores that contain it."""
        self._gather_urgent(now_s)
        while due := self._stack.due(now_s):
            wanted = [each for each in due if each.name.identity in self._wanted]
            if wanted:
                self._gather(wanted)
        self._end_stored()

    def take_completions(self) -> list[Completion]:
        """Return the transfers completed since the last call."""
        completions, self._completions = self._completions, []
        return completions

    def _load_from(self, operation: Operation, first: int, now_s: float, deadline_s: float) -> None:
        """Load the blocks from `first` on, in pieces if they are useful as a whole only."""
        last = first + PIECE_BLOCKS if operation.is_whole else len(operation.names)
        identities = [name.identity for name in operation.names[first:last]]
        loading = self._stack.load(
            identities,
            now_s,
            deadline_s - now_s,
            is_whole=operation.is_whole,
            source=None if self._source_of is None else self._source_of(identities),
        )
        if loading is None:
            places = range(first, len(operation.blocks))
            self._complete(operation, places, "computing it is faster")
        else:
            self._loads[operation.uuid] = _Load(operation, loading, first, deadline_s)

    def _land(self, load: _Load, now_s: float) -> None:
        """Copy loaded rows into the engine's blocks, and go on once that is complete."""
        operation, loading, first = load.operation, load.loading, load.first
        right = first + loading.usable_blocks
        if right > first and self.is_layered:
            blocks = operation.blocks[first:right]
            self.await_loads([operation.key])
            self._landing[operation.key] = self._device.scatter_by_layer(blocks, loading.rows)
        elif right > first and load.copy is None:
            load.copy = self._device.scatter(operation.blocks[first:right], loading.rows)
        if load.copy is not None and not load.copy.is_done:
            return
        del self._loads[operation.uuid]
        is_piece = operation.is_whole and right - first == len(loading.outcomes)
        if is_piece and right < len(operation.blocks):
            self._load_from(operation, right, now_s, load.deadline_s)
            return
        reasons = dict(enumerate(loading.outcomes, first))
        errors = {
            place: str(reasons.get(place, "lost")) for place in range(right, len(operation.blocks))
        }
        self._completions.append(Completion(operation.uuid, errors))

    def _gather_urgent(self, now_s: float) -> None:
        operations, self._urgent = self._urgent, []
        sources: dict[bytes, int] = {}
        names: list[BlockName] = []
        for operation in operations:
            for name, block in _moved(operation):
                if name.identity not in sources:
                    sources[name.identity] = block
                    names.append(name)
        wanted = self._stack.urgent(names, now_s) if names else []
        if wanted:
            copy = self._device.gather([sources[each.name.identity] for each in wanted])
            copy.hold_back()
            self._stack.store(wanted, copy)
        for operation in operations:
            self._complete(operation, (), "")

    def _gather(self, wanted: Sequence[Waiting], copy: DeviceCopy | None = None) -> None:
        """Gather blocks, each from the first store that waits for it, and pass them to the tiers.

        The other stores of a block are done with it: its bytes are on their way under its name.
        `copy`: the one that has begun.
        """
        sources: list[int] = []
        readers: set[int] = set()
        for each in wanted:
            uuids = self._wanted.pop(each.name.identity)
            sources.append(self._source(uuids[0], each.name.identity))
            readers.update(uuids)
            for uuid in uuids:
                del self._stores[uuid].waiting[each.name.identity]
        copy = copy or self._device.gather(sources)
        for uuid in readers:
            self._stores[uuid].copy = copy
        self._gathers.append(_Gather(copy, readers))
        self._stack.store(wanted, copy)

    def _source(self, uuid: int, identity: bytes) -> int:
        store = self._stores[uuid]
        return store.operation.blocks[store.waiting[identity]]

    def _end_stored(self) -> None:
        """End the stores of which every block is gathered and every copy complete."""
        while self._gathers and self._gathers[0].copy.is_done:
            gather = self._gathers.popleft()
            for uuid in gather.uuids:
                store = self._stores.get(uuid)
                if store is not None and not store.waiting and store.copy is gather.copy:
                    self._end_store(store, "")

    def _end_store(self, store: _Store, reason: str) -> None:
        for identity in store.waiting:
            wanted = self._wanted[identity]
            wanted.remove(store.operation.uuid)
            if not wanted:
                del self._wanted[identity]
        del self._stores[store.operation.uuid]
        self._complete(store.operation, store.waiting.values(), reason)

    def _complete(self, operation: Operation, places: Iterable[int], reason: str) -> None:
        self._completions.append(Completion(operation.uuid, dict.fromkeys(places, reason)))


def _moved(operation: Operation) -> Iterable[tuple[BlockName, int]]:
    return zip(operation.names, operation.blocks, strict=True)
