"""Requests with objectives: what is promised to the booked ones, and what became of the others.

give ─▶ first_token ─▶ end      met, or which objective was missed
  └─ tokens per second that its rank has promised, which decisions read
"""

from collections import Counter
from math import exp, inf, isnan, log, nan, sqrt
from typing import Literal, TypeAlias

from msgspec import Struct

from router.protocol.values import Rank, Scope
from router.sequence.rank_table import PROMISED_TOKENS_PER_S, RankTable

Outcome: TypeAlias = Literal[
    "met", "missed_ttft", "missed_tpot", "missed_both", "refused", "unknown"
]

OUTCOMES: tuple[Outcome, ...] = (
    "met",
    "missed_ttft",
    "missed_tpot",
    "missed_both",
    "refused",
    "unknown",
)
"""`unknown`: it ended without a report of its first token, or of the number of output tokens."""

REFUSED_AT_MOST = 20
"""Refusals in a row after which a request is placed all the same: predictions that refuse every
request would otherwise never be found wrong."""


class Promise(Struct, frozen=True, gc=False):
    """The objectives of a placed request, and the predictions at that time.

    In seconds; an objective that there is none of is infinite, a prediction NaN. `waited_s`: before
    it was placed, which counts towards its first token. `is_expected`: both should be met.
    """

    scope: Scope
    policy_class: str
    most_ttft_s: float
    most_tpot_s: float
    waited_s: float = 0.0
    ttft_s: float = nan
    tpot_s: float = nan
    is_expected: bool = False


class LearnedRatio:
    """Quantiles of measured times, as multiples of the predicted ones: 1 until there are any.

    `likely` is exceeded by half of them, `high` by one in five. Each moves by small steps, so that
    no single request matters, and stays between a quarter and eight.
    """

    __slots__ = ("_count", "_high", "_likely")

    def __init__(self) -> None:
        self._count = 0
        self._likely = self._high = 0.0

    @property
    def likely(self) -> float:
        """The ratio that half of the requests exceed."""
        return exp(self._likely)

    @property
    def high(self) -> float:
        """The ratio that one request in five exceeds."""
        return exp(max(self._high, self._likely))

    def note(self, ratio: float) -> None:
        """Learn from a request."""
        self._count += 1
        measured = min(max(log(max(ratio, 1e-9)), _LEAST), _MOST)
        step = max(_FIRST_STEP / sqrt(self._count), _STEP)
        self._likely += step * (0.5 if measured > self._likely else -0.5)
        self._high += step * (0.8 if measured > self._high else -0.2)


_LEAST, _MOST = log(1 / 4), log(8)
_FIRST_STEP, _STEP = 0.2, 0.02
DECISIVE = 0.25
"""The least part of an objective that a prediction is learned from: smaller ones decide nothing."""


class Errors(Struct, frozen=True):
    """The errors of a scope's predictions: of first tokens, and of times per output token."""

    ttft: LearnedRatio
    tpot: LearnedRatio


class _Live(Struct, gc=False):
    """A booked request. `booked_s`: since when. `first_s`: the time of its first token, or NaN."""

    rank: Rank
    promise: Promise
    booked_s: float
    first_s: float = nan


class Promises:
    """The promises of live bookings, and the totals of ended ones by scope and class.

    Invariants: each promise is of a booking; a rank's column is the sum of the tokens per second
    that live requests there were promised and are expected to get.
    """

    __slots__ = ("_errors", "_promised", "_refused", "_table", "live", "totals")

    def __init__(self, table: RankTable) -> None:
        self._table = table
        self.live: dict[str, _Live] = {}
        self.totals: dict[tuple[Scope, str], Counter[Outcome]] = {}
        self._promised: Counter[Rank] = Counter()
        self._errors: dict[Scope, Errors] = {}
        self._refused: Counter[Scope] = Counter()

    @property
    def live_count(self) -> int:
        """The number of live requests with objectives."""
        return len(self.live)

    def errors(self, scope: Scope) -> Errors:
        """Return the errors of a scope's predictions."""
        return self._errors.get(scope) or Errors(LearnedRatio(), LearnedRatio())

    def give(self, request_id: str, rank: Rank, promise: Promise, now_s: float) -> None:
        """Note the promise of a request that was just booked."""
        self.live[request_id] = _Live(rank, promise, now_s)
        self._refused.pop(promise.scope, None)
        if promise.is_expected and promise.most_tpot_s < inf:
            self._promised[rank] += 1
            self._table.row(rank)[PROMISED_TOKENS_PER_S] += 1 / promise.most_tpot_s

    def refuse(self, scope: Scope, policy_class: str) -> None:
        """Count a request that was refused, as its objectives cannot be met."""
        self._refused[scope] += 1
        self._count(scope, policy_class, "refused")

    def is_trial_due(self, scope: Scope) -> bool:
        """Return whether REFUSED_AT_MOST requests were refused in a row."""
        return self._refused[scope] >= REFUSED_AT_MOST

    def first_token(self, request_id: str, now_s: float) -> None:
        """Note a first token, reported as it came; others are ignored."""
        live = self.live.get(request_id)
        if live is None or not isnan(live.first_s):
            return
        live.first_s = now_s
        promise, took_s = live.promise, now_s - live.booked_s
        if promise.ttft_s >= DECISIVE * promise.most_ttft_s:
            self._learned(promise.scope).ttft.note(took_s / promise.ttft_s)

    def end(self, request_id: str, now_s: float, output_tokens: int | None) -> None:
        """Judge a request whose end is reported. `output_tokens`: None if they are not known.

        Without a first token, as of a response that is no stream, the whole time decides where it
        is short enough.
        """
        live = self._take(request_id)
        if live is None:
            return
        promise, tpot_s = live.promise, nan
        whole_s, streamed_s = now_s - live.booked_s, now_s - live.first_s
        if output_tokens is not None:
            tpot_s = streamed_s / (output_tokens - 1) if output_tokens > 1 else 0.0
        if tpot_s > 0 and promise.tpot_s >= DECISIVE * promise.most_tpot_s:
            self._learned(promise.scope).tpot.note(tpot_s / promise.tpot_s)
        ttft_s = promise.waited_s + live.first_s - live.booked_s
        if isnan(live.first_s):
            ttft_s = _if_at_most(promise.waited_s + whole_s, promise.most_ttft_s)
            if output_tokens is not None and output_tokens > 1:
                tpot_s = _if_at_most(whole_s / (output_tokens - 1), promise.most_tpot_s)
        self._count(promise.scope, promise.policy_class, _judged(promise, ttft_s, tpot_s))

    def drop(self, request_id: str) -> None:
        """Forget a booking that ended for another reason."""
        live = self._take(request_id)
        if live is not None:
            self._count(live.promise.scope, live.promise.policy_class, "unknown")

    def check_invariants(self) -> None:
        """Assert the invariants in the class's docstring. O(live requests + ranks)."""
        for rank in self._table:
            promised = sum(
                1 / live.promise.most_tpot_s
                for live in self.live.values()
                if live.rank == rank and live.promise.is_expected
            )
            assert abs(self._table.row(rank)[PROMISED_TOKENS_PER_S] - promised) < 1e-6

    def _take(self, request_id: str) -> _Live | None:
        live = self.live.pop(request_id, None)
        if live is None:
            return None
        if live.promise.is_expected and live.promise.most_tpot_s < inf:
            self._take_back(live.rank, live.promise.most_tpot_s)
        return live

    def _take_back(self, rank: Rank, tpot_s: float) -> None:
        """Subtract a promise from a rank's column, which is 0 after the last one, to the bit."""
        row = self._table.row(rank)
        self._promised[rank] -= 1
        row[PROMISED_TOKENS_PER_S] -= 1 / tpot_s
        if not self._promised[rank]:
            del self._promised[rank]
            row[PROMISED_TOKENS_PER_S] = 0.0

    def _learned(self, scope: Scope) -> Errors:
        return self._errors.setdefault(scope, Errors(LearnedRatio(), LearnedRatio()))

    def _count(self, scope: Scope, policy_class: str, outcome: Outcome) -> None:
        self.totals.setdefault((scope, policy_class), Counter())[outcome] += 1


def _if_at_most(bound_s: float, most_s: float) -> float:
    """Return an upper bound of a time that is not known, or NaN if it decides nothing."""
    return bound_s if bound_s <= most_s else nan


def _judged(promise: Promise, ttft_s: float, tpot_s: float) -> Outcome:
    """Return what became of a request; a time is NaN if it is not known."""
    missed_ttft = promise.most_ttft_s < inf and ttft_s > promise.most_ttft_s
    missed_tpot = promise.most_tpot_s < inf and tpot_s > promise.most_tpot_s
    if missed_ttft and missed_tpot:
        return "missed_both"
    if missed_ttft or missed_tpot:
        return "missed_ttft" if missed_ttft else "missed_tpot"
    is_known = not (promise.most_ttft_s < inf and isnan(ttft_s))
    is_known &= not (promise.most_tpot_s < inf and isnan(tpot_s))
    return "met" if is_known else "unknown"
