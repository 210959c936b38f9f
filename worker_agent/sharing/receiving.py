"""Blocks that other workers push into our host memory: leased, written, then named.

    reserve ─▶ the model's? room? ─▶ slots of the host tier, leased ──put──▶ written
    complete ─▶ leading written blocks ─▶ named on the tier's thread ─▶ found as any cached prefix

A lease that expires, or whose connection ends, frees its slots; what it wrote is never read. The
last part of the pool is never given away: our own prompts go first. Callable from any thread, and
blocking as long as the tier is busy.
"""

import secrets
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from msgspec import Struct

from router.protocol.values import Tier
from worker_agent.blocks.handles import MutableBlocks
from worker_agent.manager.tier_blocks import BlockSet
from worker_agent.sharing.errors import BlocksetError
from worker_agent.sharing.leases import Leases, Push
from worker_agent.sharing.peer_messages import Reserve, Reserved
from worker_agent.storage.errors import StorageError
from worker_agent.tiers.stack import TierStack
from worker_agent.transfer.stored_tier import StoredTier

T = TypeVar("T")

MAX_PUSHES = 32
"""Limit of concurrent pushes of a peer; others are refused."""
MAX_PUSHED_BLOCKS = 4096
"""Limit of names in one request."""
PEER_PART, TOTAL_PART, KEPT_PART = 4, 2, 4
"""One in this many blocks of the host tier may be leased to a peer, and to all; and is kept."""


class ReceiverCounters(Struct):
    """Counters of pushes to this worker since the start."""

    refused: int = 0
    """Requests that were refused: another model, no room, too many pushes, or a busy tier."""
    cut: int = 0
    """Requests that got a lease for a part of their blocks only."""
    named_blocks: int = 0


class PushReceiver:
    """The receiver of pushes to one rank."""

    __slots__ = ("_clock", "_fingerprint", "_host", "_lease_s", "_leases", "_stack", "_store",
                 "_timeout_s", "counters")  # fmt: skip

    def __init__(
        self,
        leases: Leases,
        host: BlockSet,
        stack: TierStack,
        store: StoredTier,
        fingerprint: int,
        *,
        lease_s: float,
        timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        """Receive blocks of a model into the host tier.

        `lease_s`: a push without a new block for this time ends. `timeout_s`: for the tier.
        """
        self.counters = ReceiverCounters()
        self._leases = leases
        self._host = host
        self._stack = stack
        self._store = store
        self._fingerprint = fingerprint
        self._lease_s = lease_s
        self._timeout_s = timeout_s
        self._clock = clock

    @property
    def max_pushes(self) -> int:
        """The limit of concurrent pushes of one peer."""
        return MAX_PUSHES

    @property
    def max_blocks(self) -> int:
        """The limit of blocks that are leased to all peers together."""
        return self._store.num_blocks // TOTAL_PART

    @property
    def max_peer_blocks(self) -> int:
        """The limit of blocks that are leased to one peer."""
        return self._store.num_blocks // PEER_PART

    def until_s(self) -> float:
        """Return when a push ends that gets no new block from now on."""
        return self._clock() + self._lease_s

    def reserve(self, request: Reserve, connection: object) -> Reserved:
        """Lease slots for a prompt's leading new blocks, as far as there is room.

        Raises BlocksetError.
        """
        try:
            self._check(request)
            reserved = self._on_tier(partial(self._granted, request, connection))
            if isinstance(reserved, BlocksetError):
                raise reserved
        except BlocksetError:
            self.counters.refused += 1
            raise
        return reserved

    def complete(self, lease: str) -> int:
        """Name the leading written blocks of a push, and return their number.

        Raises BlocksetError.
        """
        written = self._leases.take_written(lease, self._clock())
        if not written.names:
            written.handle.release()
            return 0
        name = partial(self._store.name, written.handle, written.names, written.checksums)
        try:
            self._on_tier(name)
        finally:
            if written.handle.is_live:
                written.handle.release()
        self.counters.named_blocks += len(written.names)
        return len(written.names)

    def _check(self, request: Reserve) -> None:
        """Raise BlocksetError for blocks of another model, and for names of no prompt."""
        if request.fingerprint != self._fingerprint:
            reason, allowed = f"{request.fingerprint:x}", f"{self._fingerprint:x}, as ours"
            raise BlocksetError("fingerprint", reason, allowed, rule="other_model")
        count = len(request.names)
        if count > MAX_PUSHED_BLOCKS or len({each.identity for each in request.names}) < count:
            allowed = f"at most {MAX_PUSHED_BLOCKS}, each once"
            raise BlocksetError("names", f"{count}", allowed, rule="invalid_names")

    def _granted(self, request: Reserve, connection: object) -> Reserved | BlocksetError:
        """Lease slots, on the tier's thread, whose calls must not fail; one push at a time."""
        identities = [name.identity for name in request.names]
        new = self._store.pool.scan(identities).count(None)
        if not new:
            return Reserved([], None, True)
        try:
            most_blocks, kept_blocks = self._room(connection), self._store.num_blocks // KEPT_PART
            places, blocks = self._store.reserve(identities, most_blocks, kept_blocks)
            if not blocks:
                raise BlocksetError("names", "no room", "when blocks are free", rule="no_room")
            push = Push([request.names[place] for place in places], connection)
            handle = MutableBlocks(self._host.blocks, blocks)
            name = secrets.token_hex(16)
            listed = self._leases.grant(handle, self._host.index, name, self.until_s(), push)
        except BlocksetError as error:
            return error
        self.counters.cut += len(blocks) < new
        return Reserved(places, listed, len(blocks) == new)

    def _room(self, connection: object) -> int:
        """Return how many blocks a peer may lease now. Raises BlocksetError if it is none."""
        pushes, blocks = self._leases.pushes(connection)
        if pushes >= MAX_PUSHES:
            allowed = f"at most {MAX_PUSHES}"
            raise BlocksetError("pushes", f"{pushes}", allowed, rule="too_many_pushes")
        total = self._leases.pushes()[1]
        room = min(self.max_peer_blocks - blocks, self.max_blocks - total)
        if room <= 0:
            reason, allowed = f"{blocks} of {total} blocks leased", f"at most {self.max_blocks}"
            raise BlocksetError("names", reason, allowed, rule="too_many")
        return room

    def _on_tier(self, run: Callable[[], T]) -> T:
        """Run a call on the tier's thread. Raises BlocksetError if that does not take it."""
        future: Future[T] = self._stack.call(Tier.HOST, lambda _: run())
        try:
            return future.result(self._timeout_s)
        except TimeoutError:
            if not future.cancel():  # It has just begun, and is short.
                return future.result()
            reason = f"no answer in {self._timeout_s:g} s"
        except StorageError as error:
            reason = str(error)
        raise BlocksetError("host", reason, "an idle tier", rule="busy")
