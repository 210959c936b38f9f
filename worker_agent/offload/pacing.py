"""How many blocks may be stored now: stores are never urgent, and what they disturb is.

A bucket of `burst_blocks` fills at `blocks_per_s`, at a tenth of it while requests are decoded, and
gives nothing while a load waits.
"""

from router.errors import InvalidFieldError

WHILE_DECODING = 0.1


class StorePace:
    """A bucket; time is an argument and does not run back."""

    __slots__ = ("_blocks_per_s", "_burst_blocks", "_filled_s", "_rate", "_room_blocks")

    def __init__(self, blocks_per_s: float, burst_blocks: int) -> None:
        """Raises InvalidFieldError."""
        for field, value in (("blocks_per_s", blocks_per_s), ("burst_blocks", burst_blocks)):
            if value <= 0:
                raise InvalidFieldError(field, f"{value}", "above 0")
        self._blocks_per_s = blocks_per_s
        self._burst_blocks = burst_blocks
        self._room_blocks = float(burst_blocks)
        self._rate = blocks_per_s
        self._filled_s: float | None = None

    def take(
        self, wanted_blocks: int, now_s: float, *, is_load_waiting: bool, is_decoding: bool
    ) -> int:
        """How many of the wanted blocks may be stored now; they count as stored."""
        self._fill(now_s, is_decoding=is_decoding)
        if is_load_waiting:
            return 0
        taken_blocks = min(wanted_blocks, int(self._room_blocks))
        self._room_blocks -= taken_blocks
        return taken_blocks

    @property
    def blocks_per_s(self) -> float:
        """How fast it filled last."""
        return self._rate

    def wait_s(self) -> float:
        """How long after the last `take` there is room for a block."""
        return max(1.0 - self._room_blocks, 0.0) / self._rate

    def _fill(self, now_s: float, *, is_decoding: bool) -> None:
        passed_s = 0.0 if self._filled_s is None else now_s - self._filled_s
        self._filled_s = now_s
        self._rate = self._blocks_per_s * (WHILE_DECODING if is_decoding else 1.0)
        self._room_blocks = min(self._room_blocks + self._rate * passed_s, self._burst_blocks)
