"""Pushes of a prompt's blocks to the worker that will decode it, while the prompt is computed.

    first block computed ─▶ reserve ─▶ put, group by group, as steps compute them ─▶ complete
                               └ refused, lost, late ─▶ that worker reads them, as without a push

The transfers to a worker run on a thread of its own, one at a time; the prompts' own parts belong
to the event loop. Only blocks registered on the device are sent, in use until they are.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

from msgspec import Struct, structs

from router.protocol.values import Rank
from worker_agent.blocks.handles import ImmutableBlocks, Tier
from worker_agent.blocks.names import BlockName
from worker_agent.sharing.blockset import RemoteBlocks, encode
from worker_agent.sharing.errors import BlocksetError
from worker_agent.sharing.pause import Pause
from worker_agent.sharing.peer_messages import Reserved
from worker_agent.sharing.receiving import MAX_PUSHED_BLOCKS
from worker_agent.sharing.sharing import BlockSharing
from worker_agent.transfer.errors import TransferError
from worker_agent.transfer.plan import BlockResult

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_TARGETS = 32
"""Limit of connected targets of a rank; beyond it, the least recently used is disconnected."""
GROUP_BLOCKS = 64
"""Limit of blocks in one put: the deadline of the connection is for each."""


class PushCounters(Struct):
    """Counters of the pushes of a rank since the start."""

    begun: int = 0
    failed: int = 0
    """Refused, or lost: the target reads the blocks, or computes them."""
    blocks: int = 0
    """Blocks that their targets have named."""


class Pushed(Struct, frozen=True):
    """The outcome of a push: the blocks that were named; `is_whole`: the target has the prompt."""

    blocks: int = 0
    is_whole: bool = False


class Reservation(Struct, frozen=True):
    """Another worker's memory for the blocks of these names; see `Reserved.is_whole`."""

    names: Sequence[BlockName]
    targets: RemoteBlocks
    is_whole: bool


def reservation(
    sharing: BlockSharing, names: Sequence[BlockName], target: Rank, reserved: Reserved
) -> Reservation | None:
    """Return a worker's memory for a prompt's blocks, of its answer; None: it has all of them.

    Raises BlocksetError if it is not what was imported.
    """
    listed, places = reserved.listed, reserved.places
    if listed is None:
        return None
    targets = sharing.get_remote_blocks_mutable(encode(listed))
    if listed.rank != target or len(places) != len(listed.block_indices):
        reason = f"{len(places)} places, blocks of worker {listed.rank}"
        raise BlocksetError("places", reason, f"those of {target}", rule="other_blocks")
    if set(places).difference(range(len(names))):
        raise BlocksetError("places", "unknown", "those of the prompt", rule="other_blocks")
    return Reservation([names[place] for place in places], targets, reserved.is_whole)


class Steps:
    """The steps of an engine, to be awaited; belongs to the event loop."""

    __slots__ = ("coming",)

    def __init__(self) -> None:
        self.coming = asyncio.Event()
        """The next step."""

    def note(self) -> None:
        """Wake all that wait: there are new blocks, or a prompt has ended."""
        self.coming.set()
        self.coming = asyncio.Event()


class _Lane:
    """The connection to one target, and its thread; `reserve`, `put` and `complete` run there."""

    def __init__(self, sharing: BlockSharing, target: Rank, addresses: Sequence[str],
                 timeout_s: float) -> None:  # fmt: skip
        self.target = target
        self.addresses = tuple(addresses)
        self._pause = Pause(time.monotonic)
        self._sharing = sharing
        self._client = sharing.client(target.worker_id, addresses, timeout_s)
        self._thread = ThreadPoolExecutor(1, f"push-{target}")

    async def call(self, run: Callable[..., T], *arguments: object) -> T:
        """Run a call on the thread; it goes on if it is no longer awaited."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, run, *arguments)

    def reserve(self, names: Sequence[BlockName]) -> Reservation | None:
        """Lease memory of the target; None: it has the blocks. Raises BlocksetError."""
        if self._pause.is_on:
            raise BlocksetError("target", "left alone", "one that does not fail", rule="paused")
        reserved = self._client.reserve(names, self._sharing.fingerprint)
        if reserved is None:
            raise self._lost()
        return reservation(self._sharing, names, self.target, reserved)

    def put(self, blocks: ImmutableBlocks, targets: RemoteBlocks) -> None:
        """Write blocks, and release them. Raises BlocksetError, TransferError."""
        with blocks:
            results = self._sharing.put(blocks, targets, self._client)
        if BlockResult.FAILED in results:
            raise self._lost()
        if set(results) != {BlockResult.DONE}:
            raise BlocksetError("blocks", "damaged on the way", "intact ones", rule="corrupt")

    def complete(self, targets: RemoteBlocks) -> int:
        """Have the blocks named; return how many leading ones are. Raises BlocksetError."""
        named = self._client.complete(targets.listed.lease)
        if named is None:
            raise self._lost()
        self._pause.note(failed=False)
        return named

    def end(self, targets: RemoteBlocks) -> None:
        """End a lease that is not completed, after the calls that wait."""
        self._submit(self._client.end, targets.listed)

    def close(self) -> None:
        """Disconnect, after the calls that wait."""
        self._submit(self._client.close)
        self._thread.shutdown(wait=False)

    def _lost(self) -> BlocksetError:
        """Leave the target alone for a while; return the error."""
        self._pause.note(failed=True)
        return BlocksetError("connection", "lost", "a target that answers", rule="lost")

    def _submit(self, run: Callable[..., object], *arguments: object) -> None:
        with suppress(RuntimeError):  # It is closed.
            self._thread.submit(run, *arguments)


class PromptPush:
    """The push of one prompt, of whose blocks `names` are the first."""

    def __init__(
        self, pushes: "Pushes", lane: _Lane, names: Sequence[BlockName], steps: Steps
    ) -> None:
        self._pushes = pushes
        self._lane = lane
        self._steps = steps
        self._names = names[:MAX_PUSHED_BLOCKS]
        self._is_all = len(self._names) == len(names)
        self._is_computed = False
        self._outcome: asyncio.Future[Pushed] = asyncio.get_running_loop().create_future()

    async def finished(self, timeout_s: float) -> Pushed:
        """Return the outcome, once the prompt is computed; an empty one after `timeout_s`."""
        self._is_computed = True
        self._steps.note()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(self._outcome)
        return Pushed()

    async def run(self) -> None:
        """Push the blocks as they are computed."""
        pushed, counters = Pushed(), self._pushes.counters
        counters.begun += 1
        try:
            pushed = await self._pushed()
        except (BlocksetError, TransferError) as error:
            log.info("prompt not pushed to worker %s: %s", self._lane.target, error)
        finally:
            counters.failed += not pushed.is_whole
            counters.blocks += pushed.blocks
            self._outcome.set_result(pushed)

    async def _pushed(self) -> Pushed:
        """Push the blocks. Raises BlocksetError, TransferError."""
        lane = self._lane
        if not await self._computed(self._names[:1]):
            return Pushed()
        reserved = await lane.call(lane.reserve, self._names)
        if reserved is None:
            return Pushed(0, self._is_all)
        named = None
        try:
            await self._put_all(reserved)
            named = await lane.call(lane.complete, reserved.targets)
        finally:
            if named is None:
                lane.end(reserved.targets)
        is_whole = reserved.is_whole and named == len(reserved.names)
        return Pushed(named, is_whole and self._is_all)

    async def _put_all(self, reserved: Reservation) -> None:
        """Write the leased blocks as they come, until one does not."""
        lane, names, targets, put = self._lane, reserved.names, reserved.targets, 0
        while put < len(names):
            count = await self._computed(names[put : put + GROUP_BLOCKS])
            if not count:
                return
            identities = [name.identity for name in names[put : put + count]]
            blocks = self._pushes.device.match(identities)
            if not len(blocks):
                blocks.release()
                continue
            indices = targets.listed.block_indices[put : put + len(blocks)]
            listed = structs.replace(targets.listed, block_indices=indices)
            put += len(blocks)
            await lane.call(lane.put, blocks, structs.replace(targets, listed=listed))

    async def _computed(self, names: Sequence[BlockName]) -> int:
        """Wait for leading blocks on the device, and return their number; 0: they do not come."""
        pool, identities = self._pushes.device.pool, [name.identity for name in names]
        while True:
            is_last, step = self._is_computed, self._steps.coming
            count = pool.matching(identities)
            if count or is_last:
                return count
            await step.wait()


class Pushes:
    """The pushes of one rank to other workers; belongs to the event loop.

    Invariant: at most `MAX_TARGETS` workers are connected.
    """

    def __init__(self, sharing: BlockSharing, device: Tier, timeout_s: float) -> None:
        """Create an empty set.

        `device`: where the prompts' blocks are computed. `timeout_s`: for each answer of a target.
        """
        self.counters = PushCounters()
        self.device = device
        self._sharing = sharing
        self._timeout_s = timeout_s
        self._lanes: OrderedDict[Rank, _Lane] = OrderedDict()

    @asynccontextmanager
    async def push(
        self, target: Rank, addresses: Sequence[str], names: Sequence[BlockName], steps: Steps
    ) -> AsyncIterator[PromptPush]:
        """Push a prompt's blocks to a worker until the end of the context.

        `steps`: of the engine that computes them. Raises BlocksetError without an address.
        """
        push = PromptPush(self, self._lane(target, addresses), names, steps)
        task = asyncio.create_task(push.run())
        try:
            yield push
        finally:
            task.cancel()
            await asyncio.wait([task])

    def close(self) -> None:
        """Disconnect all targets, each after its pending calls."""
        while self._lanes:
            self._lanes.popitem()[1].close()

    def _lane(self, target: Rank, addresses: Sequence[str]) -> _Lane:
        lane = self._lanes.get(target)
        if lane is None or lane.addresses != tuple(addresses):
            former, lane = lane, _Lane(self._sharing, target, addresses, self._timeout_s)
            self._lanes[target] = lane
            if former is not None:
                former.close()
        self._lanes.move_to_end(target)
        if len(self._lanes) > MAX_TARGETS:
            self._lanes.popitem(last=False)[1].close()
        return lane
