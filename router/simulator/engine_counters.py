"""What one engine has done since its life began, as its load reports tell."""

from router.protocol.loads import LoadCounters
from router.simulator.engine_runs import Run


class EngineCounters:
    """Sums over all steps that are over, and over all requests; see `LoadCounters`."""

    __slots__ = (
        "_contexts",
        "_decode_requests",
        "_prefill_tokens",
        "_resident_kv_tokens",
        "busy_s",
        "cached_tokens",
        "finished",
        "received",
        "steps",
    )

    def __init__(self) -> None:
        self.steps = self.received = self.finished = self.cached_tokens = 0
        self._prefill_tokens = self._decode_requests = self._resident_kv_tokens = 0
        self.busy_s = self._contexts = 0.0

    def add_run(self, run: Run) -> None:
        """A run of steps is over."""
        self.steps += run.steps
        self.busy_s += run.duration_s(run.steps)
        self._decode_requests += run.requests * run.steps
        self._resident_kv_tokens += run.resident_kv_tokens(run.steps)

    def add_chunk(self, tokens: int, context_tokens: int) -> None:
        """So much of a prompt was computed, behind so much before it."""
        self._prefill_tokens += tokens
        self._contexts += tokens * (context_tokens + tokens / 2)

    def told(self, run: Run | None, steps: int) -> LoadCounters:
        """The counters, with the first steps of a run that goes on."""
        busy_s, requests, kv_tokens = self.busy_s, self._decode_requests, self._resident_kv_tokens
        if run is not None and steps:
            busy_s += run.duration_s(steps)
            requests += run.requests * steps
            kv_tokens += run.resident_kv_tokens(steps)
        return LoadCounters(
            self.steps + steps,
            busy_s,
            self._prefill_tokens,
            self._contexts,
            requests,
            kv_tokens,
            self.received,
            self.finished,
            self.cached_tokens,
        )
