"""How many bytes may be stored now: stores are never urgent, and what they disturb is.

A bucket of `burst_bytes` fills at `rate_bytes_per_s`, at a tenth of it while requests are decoded,
and gives nothing while a load waits.
"""

from router.errors import InvalidFieldError

WHILE_DECODING = 0.1


class StorePace:
    """A bucket; time is an argument and does not run back."""

    __slots__ = ("_burst_bytes", "_filled_s", "_rate_bytes_per_s", "_room_bytes")

    def __init__(self, rate_bytes_per_s: float, burst_bytes: int) -> None:
        """Raises InvalidFieldError."""
        for field, value in (("rate_bytes_per_s", rate_bytes_per_s), ("burst_bytes", burst_bytes)):
            if value <= 0:
                raise InvalidFieldError(field, f"{value}", "above 0")
        self._rate_bytes_per_s = rate_bytes_per_s
        self._burst_bytes = burst_bytes
        self._room_bytes = float(burst_bytes)
        self._filled_s: float | None = None

    def take(
        self, wanted_bytes: int, now_s: float, *, is_load_waiting: bool, is_decoding: bool
    ) -> int:
        """How many of the wanted bytes may be stored now; they count as stored."""
        self._fill(now_s, is_decoding=is_decoding)
        if is_load_waiting:
            return 0
        taken_bytes = min(wanted_bytes, int(self._room_bytes))
        self._room_bytes -= taken_bytes
        return taken_bytes

    def _fill(self, now_s: float, *, is_decoding: bool) -> None:
        passed_s = 0.0 if self._filled_s is None else now_s - self._filled_s
        self._filled_s = now_s
        rate = self._rate_bytes_per_s * (WHILE_DECODING if is_decoding else 1.0)
        self._room_bytes = min(self._room_bytes + rate * passed_s, self._burst_bytes)
