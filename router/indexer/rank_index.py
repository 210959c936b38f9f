"""One rank's place in the index: its log, what it said it holds, and how far that is believed."""

from math import inf

from router.indexer.base import Indexer
from router.indexer.event_log import EventLog
from router.indexer.freshness import FRESH_S, Freshness
from router.protocol.events import LogMessage, pack_state, unpack_doubts
from router.protocol.loads import LoadReport
from router.protocol.replies import Trust, TrustState
from router.protocol.values import SCHEME, HeldState, Identity, Scope, doubt_text


class RankIndex:
    """State of one rank. `packed_state`: what the rank said it holds, with the last message;
    `is_unsettled`: it was restored, and is not checked yet.
    """

    __slots__ = (
        "_doubts_event_id",
        "_freshness",
        "_reported_doubts",
        "_reported_life",
        "_said_doubts",
        "_said_state",
        "_scheme",
        "asked_s",
        "identity",
        "indexer",
        "is_readable",
        "is_unsettled",
        "log",
        "packed_state",
        "scope",
    )

    def __init__(
        self, scope: Scope, identity: Identity, indexer: Indexer, now_s: float, scheme: str = SCHEME
    ) -> None:
        self.scope = scope
        self.identity = identity
        self.indexer = indexer
        self._scheme = scheme
        self.is_readable = identity.scheme == scheme
        self.packed_state = self._said_state = pack_state(HeldState())
        self._said_doubts = 0
        self.is_unsettled = False
        self.log = EventLog(now_s)
        self.asked_s = -inf
        self._freshness = Freshness()
        self._reported_life: int | None = None
        self._reported_doubts = 0
        self._doubts_event_id = -1

    def understands(self, message: LogMessage) -> bool:
        """Whether the message names blocks as the rank announced, and as we can."""
        return self.is_readable and message.identity == self.identity

    def note_report(self, report: LoadReport, as_of_s: float | None) -> None:
        """Note what a report says of the rank's events.

        `as_of_s`: the moment as of which it is proven to be complete, if it is.
        """
        if report.incarnation != self._reported_life:
            self._reported_life = report.incarnation
            self._freshness.forget()
            self._doubts_event_id = -1
        if report.incarnation != self.log.incarnation:
            return
        if report.event_id >= self.log.cursor:
            self._reported_doubts = report.state.doubts
            self._doubts_event_id = report.event_id
        proven_s = -inf if as_of_s is None else as_of_s
        self._freshness.note(report.event_id, proven_s, self.log.cursor)

    def trust(self, now_s: float, *, is_applying: bool) -> Trust:
        """How far the rank's overlap can be believed; `is_applying`: it is between two messages."""
        log = self.log
        as_of_s = self._freshness.as_of_s(log.cursor)
        # How long ago what the index shows was last known to be all there is; None: never.
        age_s = None if as_of_s == -inf else round(now_s - as_of_s, 3)
        if not self.is_readable:
            theirs, ours = self.identity.scheme, self._scheme
            reason = f"hash scheme {theirs!r} is not {ours!r}{_key_hint(theirs, ours)}"
            return Trust(TrustState.BLIND, log.cursor, age_s, reason)
        if log.broken_reason is not None:
            state = TrustState.BLIND if log.is_blind else TrustState.DEGRADED
            return Trust(state, log.cursor, age_s, log.broken_reason)
        if self.is_unsettled:
            reason = "restored from a snapshot; what followed is not read yet"
            return Trust(TrustState.DEGRADED, log.cursor, age_s, reason)
        doubts = self.doubts()
        if doubts:
            return Trust(TrustState.DEGRADED, log.cursor, age_s, doubt_text(doubts))
        lag = "a message is being applied" if is_applying else self._lag(age_s)
        state = TrustState.EXACT if lag is None else TrustState.LAGGING
        return Trust(state, log.cursor, age_s, lag)

    @property
    def as_of_s(self) -> float:
        """The moment as of which the index is proven to show all; -inf: it never was."""
        return self._freshness.as_of_s(self.log.cursor)

    def doubts(self) -> int:
        """The doubts that the agent had last, as far as we know: in a message or in a report."""
        if self._reported_life == self.log.incarnation and (
            self._doubts_event_id >= self.log.cursor
        ):
            return self._reported_doubts
        if self._said_state is not self.packed_state:
            self._said_state = self.packed_state
            self._said_doubts = unpack_doubts(self.packed_state)
        return self._said_doubts

    def _lag(self, age_s: float | None) -> str | None:
        """Why a rank that adds up may be behind its engine; None if it is proven not to be."""
        if self._reported_life not in (None, self.log.incarnation):
            return "its cache has begun a new life"
        behind = self._freshness.reported_event_id - self.log.cursor
        if behind > 0:
            return f"{behind} events behind"
        if age_s is None:
            return "no report confirms it"
        return None if age_s <= FRESH_S else f"last confirmed {age_s:.1f} s ago"


def _key_hint(theirs: str, ours: str) -> str:
    """What to do where blocks are hashed alike, and keyed by other secrets."""
    if theirs.partition("+")[0] != ours.partition("+")[0]:
        return ""
    return ": set block_key_file to the same secret at both"
