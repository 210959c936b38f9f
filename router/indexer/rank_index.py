"""One rank's part of the index: its log, reported state, staleness, and the trust in it.

A report proves a permanent fact: as of some time, the rank's last event was this one. An index that
has reached that event shows the rank as of that time or later.
"""

from math import inf
from typing import Literal

from msgspec import Struct

from router.indexer.base import Indexer
from router.indexer.event_log import EventLog
from router.protocol.events import LogMessage, pack_state, unpack_doubts
from router.protocol.hybrid import HybridState
from router.protocol.loads import LoadReport
from router.protocol.replies import Trust, TrustState
from router.protocol.values import SCHEME, Doubt, HeldState, Identity, Scope, doubt_text

# A lookup of an enum member costs 35 ns, so hot paths use names bound once.
_EXACT, _LAGGING = TrustState.EXACT, TrustState.LAGGING
_DEGRADED, _BLIND = TrustState.DEGRADED, TrustState.BLIND
_HYBRID = int(Doubt.HYBRID)

NO_SOURCE = "no event sockets are registered: cached blocks are estimated from bookings"
NO_CACHE = "its engine caches no prefixes: nothing is reused"
EVENTS_OFF = "use_kv_events is off: cached blocks are estimated from bookings"
"""The reasons of trust in ranks without events: of one rank, twice, and of all."""

FRESH_S = 1.0
"""Largest age of the proof with which a rank is called exact."""

_FAR_S = 1e9
"""Ages beyond it, which come of absurd reports, are not rounded to milliseconds."""


class SourceFault(Struct, frozen=True):
    """A fault of a rank's event source or its engine, in a sentence.

    `effect` on trust: `explain`, it is the reason of what is missing; `degrade`, what arrives is of
    something else than what is registered; `estimate`, nothing ever arrived, and bookings are used
    in place of events.
    """

    text: str
    effect: Literal["explain", "degrade", "estimate"] = "explain"


class Staleness:
    """The facts proven by one rank's reports.

    `reported_event_id`: the last event named by a report of this incarnation.
    """

    __slots__ = ("_as_of_s", "_awaited_event_id", "_awaited_s", "reported_event_id")

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Reset for a new incarnation, about which nothing is proven."""
        self.reported_event_id = 0
        self._as_of_s = float("-inf")
        self._awaited_event_id = 0
        self._awaited_s = float("-inf")

    def note(self, event_id: int, fresh_at_s: float, cursor: int) -> None:
        """Record that as of `fresh_at_s` the rank's last event was `event_id`."""
        self._settle(cursor)
        self.reported_event_id = max(self.reported_event_id, event_id)
        if event_id <= cursor:
            self._as_of_s = max(self._as_of_s, fresh_at_s)
        elif fresh_at_s - self._awaited_s > FRESH_S or self._awaited_event_id <= cursor:
            self._awaited_event_id, self._awaited_s = event_id, fresh_at_s

    def fresh_at_s(self, cursor: int) -> float:
        """Return the latest time as of which an index at this cursor is proven to be right."""
        if self._awaited_s > self._as_of_s:
            self._settle(cursor)
        return self._as_of_s

    def _settle(self, cursor: int) -> None:
        """Accept the awaited time as proven once the index has reached its event."""
        if self._awaited_event_id <= cursor:
            self._as_of_s = max(self._as_of_s, self._awaited_s)


class RankIndex:
    """State of one rank.

    `packed_state`: the state that the rank reported with its last message. `is_unsettled`: the rank
    was restored and is not verified yet. `hybrid`: the classes beside full attention that its last
    message reported; None: its model is not hybrid, or its agent does not report them.
    `no_events`: the reason why it has no events by choice; None if it has. `fault`: what is known
    to be wrong with its event source.
    """

    __slots__ = (
        "_age_tenths",
        "_age_text",
        "_doubts_event_id",
        "_freshness",
        "_received_doubts",
        "_received_state",
        "_reported_doubts",
        "_reported_life",
        "_scheme",
        "asked_s",
        "fault",
        "hybrid",
        "identity",
        "indexer",
        "is_readable",
        "is_unsettled",
        "log",
        "no_events",
        "packed_state",
        "scope",
    )

    def __init__(
        self,
        scope: Scope,
        identity: Identity,
        indexer: Indexer,
        now_s: float,
        scheme: str = SCHEME,
        *,
        no_events: str | None = None,
    ) -> None:
        self.scope = scope
        self.identity = identity
        self.indexer = indexer
        self._scheme = scheme
        self.is_readable = identity.scheme == scheme
        self.packed_state = self._received_state = pack_state(HeldState())
        self._received_doubts = 0
        self.is_unsettled = False
        self.hybrid: HybridState | None = None
        self.no_events = no_events
        self.fault: SourceFault | None = None
        self.log = EventLog(now_s)
        self.asked_s = -inf
        self._freshness = Staleness()
        self._reported_life: int | None = None
        self._reported_doubts = 0
        self._doubts_event_id = -1
        self._age_tenths, self._age_text = 0.0, ""

    def understands(self, message: LogMessage) -> bool:
        """Return whether the message has the announced identity, and this router's hash scheme."""
        return self.is_readable and message.identity == self.identity

    @property
    def is_estimated(self) -> bool:
        """True if nothing is known by events, and none are expected: bookings have to do."""
        if self.no_events is not None:
            return self.no_events != NO_CACHE
        return self.fault is not None and self.fault.effect == "estimate" and self.log.is_blind

    def note_report(self, report: LoadReport, fresh_at_s: float | None) -> None:
        """Record a load report's statements about the rank's events.

        `fresh_at_s`: the time as of which the report is proven to be complete; None if it is not.
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
        proven_s = -inf if fresh_at_s is None else fresh_at_s
        self._freshness.note(report.event_id, proven_s, self.log.cursor)

    def trust(self, now_s: float, is_applying: bool) -> Trust:
        """Return the trust in the rank's overlap; `is_applying`: it is between two messages."""
        if self.no_events is not None:
            if self.fault is not None and self.fault.effect == "degrade":
                return Trust(_DEGRADED, 0, None, self.fault.text)
            return Trust(TrustState.APPROXIMATE, 0, None, self.no_events)
        log = self.log
        cursor = log.cursor
        fresh_at_s = self._freshness.fresh_at_s(cursor)
        # Time since the index was last known to be complete; None: it never was.
        age_s: float | None = None
        if fresh_at_s != -inf:
            age_s = now_s - fresh_at_s
            if abs(age_s) < _FAR_S:  # `round(age_s, 3)` takes three times as long
                age_s = round(age_s * 1e3) / 1e3
        if log.broken_reason is not None or self.is_unsettled or not self.is_readable:
            state, reason = self._broken()
            return Trust(state, cursor, age_s, reason)
        doubts, fault = self.doubts(), self.fault
        if doubts:
            why = doubt_text(doubts, "" if self.hybrid is None else self.hybrid.layout.problem)
            return Trust(_DEGRADED, cursor, age_s, why if fault is None else f"{why}: {fault.text}")
        if fault is not None and fault.effect == "degrade":
            return Trust(_DEGRADED, cursor, age_s, fault.text)
        lag = "a message is being applied" if is_applying else self._lag(age_s)
        return Trust(_EXACT if lag is None else _LAGGING, cursor, age_s, lag)

    def _broken(self) -> tuple[TrustState, str]:
        """Return the state of a rank that is known to be wrong or unverified, and the reason."""
        if not self.is_readable:
            theirs, ours = self.identity.scheme, self._scheme
            reason = f"hash scheme {theirs!r} is not {ours!r}{_key_hint(theirs, ours)}"
            return _BLIND, reason
        if self.log.broken_reason is not None:
            if self.log.is_blind and self.fault is not None:
                state = TrustState.APPROXIMATE if self.is_estimated else _BLIND
                return state, self.fault.text
            return _BLIND if self.log.is_blind else _DEGRADED, self.log.broken_reason
        return _DEGRADED, "restored from a snapshot; what followed is not read yet"

    @property
    def fresh_at_s(self) -> float:
        """The time as of which the index is proven to be complete; -inf if it never was."""
        return self._freshness.fresh_at_s(self.log.cursor)

    def doubts(self) -> int:
        """Return the agent's latest known doubts, from a message or a report.

        A hybrid model is one only if the last message does not say where prompts can be resumed.
        """
        if self._reported_life == self.log.incarnation and (
            self._doubts_event_id >= self.log.cursor
        ):
            doubts = self._reported_doubts
        else:
            if self._received_state is not self.packed_state:
                self._received_state = self.packed_state
                self._received_doubts = unpack_doubts(self.packed_state)
            doubts = self._received_doubts
        if self.hybrid is None:
            return doubts
        return doubts | _HYBRID if self.hybrid.layout.problem else doubts & ~_HYBRID

    def _lag(self, age_s: float | None) -> str | None:
        """Return why a rank may be behind its engine; None if it is proven not to be."""
        life = self._reported_life
        if life is not None and life != self.log.incarnation:
            return "its cache has begun a new life"
        behind = self._freshness.reported_event_id - self.log.cursor
        if behind > 0:
            return f"{behind} events behind"
        if age_s is None:
            return "no report confirms it"
        if age_s <= FRESH_S:
            return None
        tenths = age_s * 10 // 1  # not a number for absurd ages, which are formatted each time
        if tenths != self._age_tenths:  # formatting takes as long as the rest
            self._age_tenths, self._age_text = tenths, f"last confirmed {age_s:.1f} s ago"
        return self._age_text


def _key_hint(theirs: str, ours: str) -> str:
    """Return advice for equal hash schemes that are keyed by different secrets."""
    if theirs.partition("+")[0] != ours.partition("+")[0]:
        return ""
    return ": set block_key_file to the same secret at both"
