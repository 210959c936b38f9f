"""Work with a known duration, from the counters of an engine that measures no busy time.

    polls, a second apart ─┬─ 5 s with work at every poll ─▶ WALL: its duration is the clock's
                           ├─ … with no prompt at its ends ▶ CLEAR: the same, and more exact
                           ├─ … without any prompt ────────▶ FELT: the engine's own, by its outputs
                           └─ requests that ended ─────────▶ ENDED: the times of their prompts

vLLM counts steps that gave an output, whole prompts at their first token, and decoding requests
once per step. The tokens of a prompt that is computed across the end of a window are counted in the
next one: half of the change of the tokens admitted and not yet counted belongs to this one. A
window therefore ends at a poll without such tokens, if there is one soon. What requests waited
between two of their outputs is the duration of the steps, as those felt it that decoded: it shows
whether the engine was idle in between. The time of a prompt that ended contains other prompts
computed with it: a first guess, until there are windows.
"""

import math
from typing import NamedTuple

from msgspec.structs import replace

from router.protocol.loads import LoadCounters, TimedWork
from router.publisher.engine_metrics.loads import EngineLoad, WorkSeen

WINDOW_S = 5.0
"""The length of a window. Longer ones are no better."""

_TOLERANCE_S = 0.5
"""A window may be this much shorter, because polls are not exactly a second apart."""

_MOST_WINDOW_S = 10.0
"""The length at which a window ends amid prompts."""

_MOST_OPEN = 0.5
"""The tokens of prompts in work at the ends of a window, relative to its own, above which these are
not known well enough. Any part of them may have been computed in it: at this limit, the standard
error of a number between 0 and all of them is 0.5 / √12 = 0.15, the error of a WALL.
"""

_MOST_GAP_S = 2.5
"""The time between two polls after which the work in between is unknown."""

SLOW_POLL_S = 0.3
"""A poll that took longer is not used for rates: its engine counted at an unknown moment of it."""

WARM_S = 2.0
"""The first work of an engine's life, which compiles and warms up."""

WARM_REQUESTS = 8
"""An engine that has finished as many requests before is warm."""

_LEAST_FELT = 0.9
"""The part of a window that outputs must account for; else the engine was idle in it."""

_GUESSES = 8
"""The number of windows with prompts after which first guesses are not needed."""

_MOST_TOGETHER = 0.3
"""The mean number of prompts in work above which the time of one contains too much of others."""

WALL, FELT, ENDED, CLEAR = 0, 1, 2, 3
_ERRORS = (0.15, 0.05, 0.3, 0.05)
"""The kinds of timed work, and the standard error of the duration of each, relative to it."""


class _Began(NamedTuple):
    """The beginning of a window: what the engine had counted, and when.

    `is_clear`: there was no prompt in work.
    """

    seen: WorkSeen
    at_s: float
    is_clear: bool = False


class RateWindows:
    """The timed work of one rank, in one life of its engine.

    `timed`: sums over all windows of each kind, as in `PolledLoad`.
    """

    __slots__ = (
        "_aborted_tokens",
        "_began",
        "_cold_s",
        "_context_tokens",
        "_first",
        "_guesses_left",
        "_last",
        "_settles_at",
        "_used",
        "timed",
    )

    def __init__(self, *, is_warm: bool) -> None:
        self.timed = tuple(TimedWork(error=error) for error in _ERRORS)
        self._cold_s = 0.0 if is_warm else WARM_S
        self._began: _Began | None = None
        self._first: _Began | None = None
        self._last: _Began | None = None
        self._used: list[int] = []
        self._aborted_tokens = 0
        self._guesses_left = _GUESSES
        self._context_tokens = 0.0
        self._settles_at = 1

    def take(self, seen: WorkSeen, dated_s: float) -> None:
        """Add what an engine had counted at this time."""
        before, self._last = self._last, _Began(seen, dated_s)
        self._first = self._first or self._last
        self._settle_context(seen)
        elapsed_s = 0.0 if before is None else dated_s - before.at_s
        is_continued = before is not None and before.seen.is_working and elapsed_s <= _MOST_GAP_S
        if self._cold_s > 0:
            self._cold_s -= elapsed_s if is_continued and seen.is_working else 0.0
            return
        if before is not None and self._guesses_left and self._are_apart(seen, dated_s):
            self._guess(before.seen, seen)
        began = self._began
        if not seen.is_working:
            self._began = None
            self._aborted_tokens = seen.admitted_tokens - seen.prompt_tokens
        elif began is None or not is_continued or seen.preemptions != began.seen.preemptions:
            self._begin(seen, dated_s)
        else:
            self._continue(began, seen, dated_s)

    def _begin(self, seen: WorkSeen, dated_s: float) -> None:
        self._began = _Began(seen, dated_s, self._is_clear(seen))
        self._used = [seen.used_tokens]

    def _continue(self, began: _Began, seen: WorkSeen, dated_s: float) -> None:
        """End a window where no prompt is in work, or later; begin another one."""
        self._used.append(seen.used_tokens)
        elapsed_s, is_clear = dated_s - began.at_s, self._is_clear(seen)
        is_long = elapsed_s >= WINDOW_S - _TOLERANCE_S
        if (is_long and is_clear) or elapsed_s >= _MOST_WINDOW_S - _TOLERANCE_S:
            self._end(began, seen, elapsed_s, CLEAR if is_clear and began.is_clear else WALL)
            self._begin(seen, dated_s)
        elif is_clear and not began.is_clear:
            self._begin(seen, dated_s)

    def _is_clear(self, seen: WorkSeen) -> bool:
        """Return whether no prompt is in work. Prompts that were aborted stay in the difference."""
        return self._in_work(seen) <= 0

    def _in_work(self, seen: WorkSeen) -> int:
        """Return the tokens of prompts in work, as far as they are not known to be aborted."""
        return seen.admitted_tokens - seen.prompt_tokens - self._aborted_tokens

    def _open_tokens(self, *ends: WorkSeen) -> float:
        """Return the tokens of prompts in work at both ends of a window, as independent errors."""
        return math.hypot(*(max(self._in_work(end), 0) for end in ends))

    def _end(self, window: _Began, seen: WorkSeen, elapsed_s: float, kind: int) -> None:
        """Add a window to the sums of its kind, if its duration is known."""
        began = window.seen
        steps, outputs = seen.steps - began.steps, seen.outputs - began.outputs
        if not steps or not outputs:
            return
        counted = seen.prompt_tokens - began.prompt_tokens
        underway = seen.admitted_tokens - began.admitted_tokens - counted
        felt_s = steps * (seen.outputs_s - began.outputs_s) / outputs
        if self._open_tokens(began, seen) > _MOST_OPEN * max(counted + underway / 2, 0.0):
            return
        if felt_s >= _LEAST_FELT * elapsed_s:
            tokens = max(round(counted + underway / 2), 0)
            self._guesses_left -= tokens > 0 < self._guesses_left
            self._add(kind, elapsed_s, steps, tokens, outputs)
        elif not counted and not underway:
            self._add(FELT, felt_s, steps, 0, outputs)

    def _are_apart(self, seen: WorkSeen, dated_s: float) -> bool:
        """Return whether few prompts were computed together: on average, less than one in work."""
        first = self._first
        if first is None:
            return False
        return seen.finished_s - first.seen.finished_s <= _MOST_TOGETHER * (dated_s - first.at_s)

    def _guess(self, before: WorkSeen, seen: WorkSeen) -> None:
        """Add the prompts that ended between two polls, at one step each."""
        requests, tokens = seen.finished - before.finished, seen.finished_tokens
        tokens -= before.finished_tokens
        if requests and tokens > 0:
            self._add(ENDED, seen.finished_s - before.finished_s, requests, tokens, 0)

    def _add(self, kind: int, busy_s: float, steps: int, tokens: int, outputs: int) -> None:
        used_tokens = sum(self._used) / len(self._used) if outputs else 0.0
        sums = self.timed[kind].work
        added = LoadCounters(
            steps=sums.steps + steps,
            busy_s=sums.busy_s + busy_s,
            prefill_tokens=sums.prefill_tokens + tokens,
            prefill_token_contexts=sums.prefill_token_contexts + tokens * self._context_tokens,
            decode_requests=sums.decode_requests + outputs,
            resident_kv_tokens=sums.resident_kv_tokens + round(steps * used_tokens),
        )
        timed = list(self.timed)
        timed[kind] = TimedWork(added, _ERRORS[kind])
        self.timed = tuple(timed)

    def _settle_context(self, seen: WorkSeen) -> None:
        """Take over the mean context of a token each time that the requests have doubled.

        Contexts are not counted, and a mean that changed with every window would be taken for it.
        """
        if seen.finished >= self._settles_at:
            self._context_tokens, self._settles_at = seen.context_tokens, 2 * seen.finished


class RateEstimator:
    """The load of one rank with its timed work, over all lives of its engine.

    `life`: their number so far.
    """

    __slots__ = ("_last", "_started_s", "_windows", "life")

    def __init__(self) -> None:
        self.life = 0
        self._last: EngineLoad | None = None
        self._started_s: float | None = None
        self._windows = RateWindows(is_warm=False)

    def take(
        self, load: EngineLoad, dated_s: float, took_s: float, started_s: float | None = None
    ) -> EngineLoad:
        """Return a load with its timed work.

        `dated_s`: the middle of the poll, which took `took_s`. `started_s`: the engine's start.
        """
        before = self._last
        if before is None or self._is_new_life(before, load, started_s):
            self.life += 1
            is_warm = load.counters.requests_finished >= WARM_REQUESTS
            self._windows = RateWindows(is_warm=is_warm)
        self._last, self._started_s = load, started_s
        if load.timed is not None:
            return load
        if load.seen is not None and took_s <= SLOW_POLL_S:
            self._windows.take(load.seen, dated_s)
        return replace(load, timed=self._windows.timed)

    def _is_new_life(self, before: EngineLoad, load: EngineLoad, started_s: float | None) -> bool:
        """Return whether an engine restarted: its start changed, or a counter fell."""
        if None not in (started_s, self._started_s) and started_s != self._started_s:
            return True
        now, then = load.counters, before.counters
        fallen = now.steps < then.steps or now.prefill_tokens < then.prefill_tokens
        return fallen or now.decode_requests < then.decode_requests
