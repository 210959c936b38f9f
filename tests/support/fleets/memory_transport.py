"""A transport in memory, for publishers under test."""

from router.runtime.bus.errors import LogConflictError


class MemoryTransport:
    """A transport in memory, for one process; `log` and `broadcasts` contain the messages."""

    def __init__(self) -> None:
        self.log: list[tuple[int, str, bytes]] = []
        self.broadcasts: list[tuple[str, bytes]] = []
        self._sequence = 0

    async def append(
        self,
        subject: str,
        payload: bytes,
        *,
        expected_sequence: int,
        replaces_history: bool = False,
    ) -> int:
        """Append as in `Transport`."""
        if await self.last_sequence(subject) != expected_sequence:
            raise LogConflictError(subject, expected_sequence)
        self._sequence += 1
        if replaces_history:
            await self.drop_before(subject, self._sequence)
        self.log.append((self._sequence, subject, payload))
        return self._sequence

    async def last_sequence(self, subject: str) -> int:
        """Return the sequence as in `Transport`."""
        return max((sequence for sequence, s, _ in self.log if s == subject), default=0)

    async def drop_before(self, subject: str, sequence: int) -> None:
        """Drop messages as in `Transport`."""
        self.log = [m for m in self.log if m[1] != subject or m[0] >= sequence]

    async def broadcast(self, subject: str, payload: bytes) -> None:
        """Publish as in `Transport`."""
        self.broadcasts.append((subject, payload))
