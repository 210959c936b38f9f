"""The beacons that an agent has heard, for its load reports to carry back."""

from collections import OrderedDict

from router.protocol.loads import Beacon

MAX_SOURCES = 64
KEPT_S = 5.0


class HeardBeacons:
    """The last beacon of each source; of those that fell silent, none. Bounded: beyond, the source
    that was silent for longest is forgotten.
    """

    __slots__ = ("_heard",)

    def __init__(self) -> None:
        self._heard: OrderedDict[int, tuple[int, float]] = OrderedDict()

    def hear(self, beacon: Beacon, now_s: float) -> None:
        """Note a beacon."""
        self._heard[beacon.source_id] = (beacon.beacon_id, now_s)
        self._heard.move_to_end(beacon.source_id)
        if len(self._heard) > MAX_SOURCES:
            self._heard.popitem(last=False)

    def last(self, now_s: float) -> dict[int, int]:
        """The last beacon of each source, by source."""
        while self._heard and now_s - next(iter(self._heard.values()))[1] > KEPT_S:
            self._heard.popitem(last=False)
        return {source_id: beacon_id for source_id, (beacon_id, _) in self._heard.items()}
