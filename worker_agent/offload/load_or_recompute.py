"""The choice between loading blocks from a slower tier and computing them: the faster one.

    load_s(n)      = latency + (queued bytes + n blocks) / bandwidth          measured, per tier
    recompute_s(n) = n blocks of tokens / prefill rate                        measured

Both rates are moving averages, in which the newest value counts a tenth. A tier without
measurements is loaded from, because it would otherwise not be measured.
"""

from router.errors import InvalidFieldError
from worker_agent.offload.probe import TierProbe

NEWEST = 0.1


class Average:
    """An exponentially weighted average; None before the first value."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float | None = None

    def note(self, measured: float) -> None:
        """Add a value, which counts a tenth."""
        before = measured if self.value is None else self.value
        self.value = before + NEWEST * (measured - before)


class TierSpeed:
    """The speed of a tier's reads, and the bytes still to be read."""

    __slots__ = ("_bandwidth", "_block_bytes", "_latency", "queued_bytes")

    def __init__(self, block_bytes: int) -> None:
        """Initialise without measurements. Raises InvalidFieldError."""
        if block_bytes < 1:
            raise InvalidFieldError("block_bytes", f"{block_bytes}", "at least 1")
        self._block_bytes = block_bytes
        self._bandwidth = Average()
        self._latency = Average()
        self.queued_bytes = 0

    def note(self, blocks: int, waited_s: float, copied_s: float) -> None:
        """Record a load of `blocks` blocks: its time in the queue, and its time of copying."""
        self._latency.note(waited_s)
        if copied_s > 0:
            self._bandwidth.note(blocks * self._block_bytes / copied_s)

    def note_probe(self, probe: TierProbe) -> None:
        """Record the measurement of a probe."""
        self._latency.note(probe.latency_s)
        self._bandwidth.note(probe.read_bytes_per_s)

    def load_s(self, blocks: int) -> float:
        """Return the time to load `blocks` blocks from now; 0 before any measurement."""
        if self._bandwidth.value is None:
            return 0.0
        due_bytes = self.queued_bytes + blocks * self._block_bytes
        return (self._latency.value or 0.0) + due_bytes / self._bandwidth.value


class LoadOrRecompute:
    """A comparison of loading with computing, for blocks of `block_size` tokens."""

    __slots__ = ("_block_size", "_prefill")

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._prefill = Average()

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """The rate at which prompts are computed; None before any measurement."""
        return self._prefill.value

    def note_prefill(self, tokens: int, busy_s: float) -> None:
        """Record that `tokens` prompt tokens were computed in `busy_s`."""
        if tokens and busy_s > 0:
            self._prefill.note(tokens / busy_s)

    def recompute_s(self, blocks: int) -> float | None:
        """Return the time to compute `blocks` blocks. Returns None before any measurement."""
        if self._prefill.value is None:
            return None
        return blocks * self._block_size / self._prefill.value

    def blocks_to_load(self, speed: TierSpeed, blocks: int, deadline_s: float | None = None) -> int:
        """Return the number of leading blocks to load.

        It is 0 if computing is faster, else as many as arrive before the deadline. O(log blocks).
        """
        recompute_s = self.recompute_s(blocks)
        if recompute_s is not None and speed.load_s(blocks) >= recompute_s:
            return 0
        if deadline_s is None or speed.load_s(blocks) <= deadline_s:
            return blocks
        low, high = 0, blocks
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if speed.load_s(middle) <= deadline_s else (low, middle - 1)
        return low
