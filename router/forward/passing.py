"""State of the routes that are passed on: workers without a route, and tokens per byte of bodies.

Pure, except that callers bring the time.
"""

from router.forward.apis.passed import PASSED
from router.forward.placement import PromptTokens
from router.forward.request_body import CompletionRequest
from router.protocol.requests import Usage

FORGOTTEN_S = 60.0
"""Time after which a worker is tried again: its engine may have been restarted."""

MOST_MISSING = 4096
"""Limit of remembered workers and routes; beyond it, the oldest is dropped."""

TOKENS_A_BYTE = 0.25
MOST_TOKENS = 65_536
"""Limit of the tokens that are booked for one request: a file may have many bytes for each."""

MOST_RATES = 1024
_NEWEST = 0.2
"""The weight of the newest count in the average."""


class MissingRoutes:
    """Workers that answered that they do not have a route."""

    __slots__ = ("_until_s",)

    def __init__(self) -> None:
        self._until_s: dict[tuple[str, str, int], float] = {}

    def __len__(self) -> int:
        return len(self._until_s)

    def note(self, model: str, path: str, worker_id: int, now_s: float) -> None:
        """Record that a worker of a model does not have a route."""
        key = (model, path, worker_id)
        self._until_s.pop(key, None)
        self._until_s[key] = now_s + FORGOTTEN_S
        if len(self._until_s) > MOST_MISSING:
            del self._until_s[next(iter(self._until_s))]

    def workers(self, model: str, path: str, now_s: float) -> set[int]:
        """Return the workers of a model without a route, as of late. O(remembered)."""
        while self._until_s:
            oldest = next(iter(self._until_s))
            if self._until_s[oldest] > now_s:
                break
            del self._until_s[oldest]
        return {key[2] for key in self._until_s if key[:2] == (model, path)}


class BodySizes:
    """Tokens per byte of bodies, by model and route, learned from the usage of answers.

    Beyond `MOST_RATES`, the one learned first is dropped.
    """

    __slots__ = ("_rates",)

    def __init__(self) -> None:
        self._rates: dict[tuple[str, str], float] = {}

    def __len__(self) -> int:
        return len(self._rates)

    def estimated(self, asked: CompletionRequest) -> PromptTokens:
        """Return the tokens that a request is booked with; none of them is known."""
        tokens = 1
        if PASSED[asked.path].is_booked:
            rate = self._rates.get((asked.model, asked.path), TOKENS_A_BYTE)
            tokens = min(max(1, int(len(asked.to_engine()) * rate)), MOST_TOKENS)
        return PromptTokens([0] * tokens, are_certain=False)

    def note(self, asked: CompletionRequest, usage: Usage) -> None:
        """Learn from an answer."""
        key, size_bytes = (asked.model, asked.path), len(asked.to_engine())
        rate = min(usage.prompt_tokens / max(1, size_bytes), 1.0)
        before = self._rates.get(key, TOKENS_A_BYTE)
        self._rates[key] = before + _NEWEST * (rate - before)
        if len(self._rates) > MOST_RATES:
            del self._rates[next(iter(self._rates))]
