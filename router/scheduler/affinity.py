"""Bindings of sessions to the rank that served them first, until idle for the time to live."""

from collections.abc import Iterator

from msgspec import Struct

from router.protocol.values import Rank, Scope


class Session(Struct, frozen=True, gc=False, cache_hash=True):
    """A conversation, named by callers; equal names in different scopes are different sessions."""

    scope: Scope
    session_id: str


class _Binding(Struct, gc=False):
    rank: Rank
    expires_s: float


class AffinityTable:
    """Bindings of sessions; beyond the limit the one idle longest is evicted.

    Invariants: `_bindings` is in order of `expires_s`, and holds at most `max_sessions`; none
    expires before `_due_s`.
    """

    __slots__ = ("_bindings", "_due_s", "_max_sessions", "_ttl_s", "evicted", "expired")

    def __init__(self, ttl_s: float, max_sessions: int) -> None:
        self._ttl_s = ttl_s
        self._max_sessions = max_sessions
        self._bindings: dict[Session, _Binding] = {}
        self._due_s = float("-inf")
        self.evicted = 0
        self.expired = 0

    def __len__(self) -> int:
        return len(self._bindings)

    def __iter__(self) -> Iterator[Session]:
        """Return the sessions, longest idle first."""
        return iter(self._bindings)

    def find(self, session: Session, now_s: float) -> Rank | None:
        """Return the rank of a session; None if unbound. O(1), plus O(1) per expired session."""
        if now_s >= self._due_s:
            self._expire(now_s)
        binding = self._bindings.get(session)
        return None if binding is None else binding.rank

    def bind(self, session: Session, rank: Rank, now_s: float, gone: Rank | None = None) -> Rank:
        """Record that a rank served a session, and restart its idle time. Returns its bound rank.

        The first binding stays, unless it is to the rank that is `gone`. O(1), as `find`.
        """
        if now_s >= self._due_s:
            self._expire(now_s)
        binding = self._bindings.pop(session, None)
        bound = rank if binding is None or binding.rank == gone else binding.rank
        self._bindings[session] = _Binding(bound, now_s + self._ttl_s)
        if len(self._bindings) > self._max_sessions:
            del self._bindings[next(iter(self._bindings))]
            self.evicted += 1
        return bound

    def release(self, session: Session) -> None:
        """Forget a session. O(1)."""
        self._bindings.pop(session, None)

    def check_invariants(self) -> None:
        """Assert the invariants in the class's docstring. O(sessions)."""
        expiries = [binding.expires_s for binding in self._bindings.values()]
        assert expiries == sorted(expiries)
        assert len(expiries) <= self._max_sessions
        assert all(expires_s >= self._due_s for expires_s in expiries)

    def _expire(self, now_s: float) -> None:
        while self._bindings:
            session, binding = next(iter(self._bindings.items()))
            if binding.expires_s > now_s:
                self._due_s = binding.expires_s
                return
            del self._bindings[session]
            self.expired += 1
        self._due_s = now_s + self._ttl_s
