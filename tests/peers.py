"""Routers' words to each other, with what does not matter filled in."""

from router.protocol.replicas import Frame, Progress, SharedReservation, SnapshotPart
from router.protocol.values import Rank
from router.sequence.shared_reservations import SharedReservations


def reservation(request_id, rank=1, blocks=2, progress=None):
    hashes = b"".join(block.to_bytes(8, "little") for block in range(blocks))
    progress = progress or Progress()
    return SharedReservation(request_id, Rank(rank, 0), hashes, 1, 4 * blocks + 1, 0, 4, progress)


class Other:
    """A router that says what it is told to; `has` is what it has told so far."""

    def __init__(self, router_id=5, incarnation=1):
        self.router_id, self.incarnation, self.sequence = router_id, incarnation, 0
        self.has = SharedReservations()

    def books(self, *request_ids, **fields):
        added = tuple(reservation(request_id, **fields) for request_id in request_ids)
        for each in added:
            self.has.put(each)
        return self._frame(added=added)

    def frees(self, *request_ids):
        for request_id in request_ids:
            self.has.pop(request_id)
        return self._frame(freed=request_ids)

    def beats(self):
        return self._said()

    def snapshot(self, parts=1):
        told = tuple(self.has)
        size = -(-len(told) // parts)
        return [
            SnapshotPart(self.router_id, self.incarnation, self.sequence, part, parts,
                         told[part * size : (part + 1) * size])
            for part in range(parts)
        ]  # fmt: skip

    def _frame(self, **changes):
        self.sequence += 1
        return self._said(**changes)

    def _said(self, added=(), progressed=(), freed=()):
        head = (self.router_id, self.incarnation, self.sequence)
        return Frame(*head, added, progressed, freed, len(self.has), self.has.digest)
