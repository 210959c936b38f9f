"""Routers' words to each other, with what does not matter filled in."""

from router.core.commands import ApplyPeer
from router.core.effects import TellReplica
from router.protocol.replicas import (
    Frame,
    Progress,
    ProgressTold,
    SharedReservation,
    SnapshotPart,
)
from router.protocol.values import Rank
from router.sequence.rank_table import (
    DECODE_BLOCKS,
    DECODING_KV_TOKENS,
    PREFILL_TOKENS,
    QUEUED_CONTEXTS,
)
from router.sequence.replicas.reservation_digest import ReservationDigest
from router.sequence.replicas.reservation_log import ReservationLog
from support.values.builders import World


def reservation(request_id, rank=1, blocks=2, progress=None, block_size=4):
    hashes = b"".join(block.to_bytes(8, "little") for block in range(blocks))
    progress = progress or Progress()
    own = (hashes, 1, 4 * blocks + 1, 0, block_size)
    return SharedReservation(request_id, Rank(rank, 0), *own, progress)


class Other:
    """A router that sends what a test sets; `has` is what it has sent so far."""

    def __init__(self, router_id=5, incarnation=1):
        self.router_id, self.incarnation, self.sequence = router_id, incarnation, 0
        self.has = ReservationDigest()

    def books(self, *request_ids, **fields):
        added = tuple(reservation(request_id, **fields) for request_id in request_ids)
        for each in added:
            self.has.put(each)
        return self.frame(added=added)

    def frees(self, *request_ids):
        for request_id in request_ids:
            self.has.pop(request_id)
        return self.frame(freed=request_ids)

    def beats(self):
        return self._said()

    def snapshot(self, parts=1):
        entries = tuple(self.has)
        size = -(-len(entries) // parts)
        return [
            SnapshotPart(self.router_id, self.incarnation, self.sequence, part, parts,
                         entries[part * size : (part + 1) * size])
            for part in range(parts)
        ]  # fmt: skip

    def frame(self, **changes):
        self.sequence += 1
        return self._said(**changes)

    def _said(self, added=(), progressed=(), freed=()):
        head = (self.router_id, self.incarnation, self.sequence)
        return Frame(*head, added, progressed, freed, len(self.has), self.has.digest)


class Sharing:
    """Routers' cores that know the same workers, and share what they book."""

    def __init__(self, *router_ids, workers=(1, 2), **settings):
        self.worlds = [World(router_id=router_id, **settings) for router_id in router_ids]
        self.now_s = 0.0
        for world, router_id in zip(self.worlds, router_ids, strict=True):
            world.core.tracker.ledger = ReservationLog(router_id, incarnation=1)
            for worker_id in workers:
                world.worker(worker_id)

    def core(self, router_id):
        return next(w.core for w in self.worlds if w.core.foreign.replicas.router_id == router_id)

    def exchange(self, effects=(), lost=()):
        """Exchange all news among all routers, until there are none.

        `lost`: routers whose frames get lost.
        """
        self.carry(effects)
        for _ in range(3):
            for world in self.worlds:
                ledger = world.core.tracker.ledger
                frame = ledger.take_frame(world.core.tracker.shared, self.now_s)
                for other in self.worlds if frame and ledger.router_id not in lost else ():
                    self.carry(other.core.handle(ApplyPeer(frame), self.now_s)[1])

    def carry(self, effects):
        for effect in effects:
            if isinstance(effect, TellReplica):
                core, message = self.core(effect.router_id), effect.message
                if isinstance(message, ProgressTold):
                    core.handle(ApplyPeer(message), self.now_s)
                    continue
                for part in core.tracker.ledger.snapshot():
                    self.core(message.asked_by).handle(ApplyPeer(part), self.now_s)

    def loads(self):
        """What each router thinks every rank is busy with; of the booked load only."""
        columns = [PREFILL_TOKENS, QUEUED_CONTEXTS]
        for world in self.worlds:
            world.core.tracker.check_invariants()
            world.core.foreign.replicas.check_invariants()
        return [
            {rank: (w.core.ranks.row(rank)[columns].tolist(),
                    w.core.ranks.row(rank)[DECODE_BLOCKS : DECODING_KV_TOKENS + 1].tolist())
             for rank in w.core.ranks}
            for w in self.worlds
        ]  # fmt: skip
