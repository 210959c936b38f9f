"""Marks in time that routers send and load reports carry back.

No two clocks need agree: a report that carries a beacon was made after the beacon was sent, and
when that was, its sender knows. Ids are random, so that nobody takes another life's for its own.
"""

from collections import OrderedDict
from random import Random

from router.protocol.loads import Beacon, LoadReport

REMEMBERED = 64


class Beacons:
    """The beacons that one process has sent."""

    __slots__ = ("_rng", "_sent_s", "_source_id")

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._source_id = rng.getrandbits(53)
        self._sent_s: OrderedDict[int, float] = OrderedDict()

    def next(self, now_s: float) -> Beacon:
        """A beacon to send now."""
        beacon = Beacon(self._source_id, self._rng.getrandbits(53))
        self._sent_s[beacon.beacon_id] = now_s
        if len(self._sent_s) > REMEMBERED:
            self._sent_s.popitem(last=False)
        return beacon

    def as_of_s(self, report: LoadReport) -> float | None:
        """Since when there is nothing that neither the report nor the log before it tells; None
        where the report does not prove it.
        """
        sent_s = self._sent_s.get(report.heard.get(self._source_id, -1))
        return None if sent_s is None else sent_s - report.waiting_s
