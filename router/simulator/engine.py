"""A simulated engine: chunked prefill, continuous batching, a prefix cache.

    submit ─▶ waiting ─▶ prefilling ─▶ decoding ─▶ finished
                (its blocks fit)   (first token)

Time is told, and nothing happens by itself: `due_s` is when the present run of steps ends, and
whoever drives the engine calls `advance` then. All requests of a run go through the same steps, so
a run costs what changes at its ends, not the tokens it computes.
"""

from collections import deque
from heapq import heappop, heappush
from math import inf

from msgspec import Struct

from router.protocol.loads import LoadConstants, LoadCounters, LoadGauges
from router.simulator.block_cache import BlockCache
from router.simulator.engine_counters import EngineCounters
from router.simulator.engine_model import Chunk, StepModel
from router.simulator.engine_runs import Run
from router.simulator.traces import TraceRequest


class Work:
    """A request on its way through an engine; `caller` is whose it is."""

    __slots__ = (
        "cached_blocks",
        "caller",
        "computed_tokens",
        "finish_step",
        "request",
        "request_id",
    )

    def __init__(self, caller: int, request_id: str, request: TraceRequest) -> None:
        self.caller = caller
        self.request_id = request_id
        self.request = request
        self.cached_blocks = 0
        self.computed_tokens = 0
        self.finish_step = 0


class Progress(Struct, gc=False):
    """What a run of steps brought about, and its steps as the requests decoding in them saw them.

    `grown`: who needs one more block for its output from now on; the requests have it already.
    """

    prefilled: list[Work]
    grown: list[Work]
    finished: list[Work]
    decoded_tokens: int
    mean_step_s: float


class Engine:
    """One engine. `slowness` multiplies the duration of steps, from the next one on."""

    __slots__ = (
        "_admitted",
        "_block_size",
        "_chunks",
        "_counters",
        "_decoding",
        "_kv_tokens",
        "_milestones",
        "_model",
        "_order",
        "_prefilling",
        "_run",
        "_tells_growth",
        "_waiting",
        "cache",
        "due_s",
        "slowness",
    )

    def __init__(self, model: StepModel, block_size: int, *, tells_growth: bool) -> None:
        self._model = model
        self._block_size = block_size
        self._tells_growth = tells_growth
        self.cache = BlockCache(model.capacity_tokens // block_size)
        self.slowness = 1.0
        self.due_s = inf
        self._run: Run | None = None
        self._chunks: list[tuple[Work, int]] = []
        self._waiting: deque[Work] = deque()
        self._prefilling: deque[Work] = deque()
        self._milestones: list[tuple[int, int, Work]] = []
        self._order = self._decoding = self._admitted = self._kv_tokens = 0
        self._counters = EngineCounters()

    def fits(self, request: TraceRequest) -> bool:
        """Whether the request can be served at all."""
        return self._blocks(request) <= self.cache.capacity_blocks

    def submit(self, work: Work, now_s: float) -> None:
        """A request that `fits` arrives; it takes part from the next step on."""
        self._counters.received += 1
        self._waiting.append(work)
        self.interrupt(now_s)

    def interrupt(self, now_s: float) -> None:
        """Something changes: end the present run with the step under way."""
        if self._run is None:
            self._begin(now_s)
        elif self._run.steps > 1:
            run = self._run
            self._run = Run(
                run.start_s,
                run.steps_begun(now_s),
                run.first_step_s,
                run.growth_s,
                run.requests,
                run.kv_tokens,
            )
            self.due_s = self._run.end_s

    def advance(self) -> Progress:
        """End the run that is due, and begin the next one."""
        run, now_s = self._run, self.due_s
        assert run is not None
        decoded_tokens = run.requests * run.steps
        self._counters.add_run(run)
        self._kv_tokens += decoded_tokens
        progress = Progress([], [], [], decoded_tokens, run.duration_s(run.steps) / run.steps)
        self._pass_milestones(progress)
        self._end_chunks(progress)
        self._begin(now_s)
        return progress

    def works(self) -> list[Work]:
        """Every request here, in no meaningful order."""
        return [*self._waiting, *self._prefilling, *(work for _, _, work in self._milestones)]

    def counters(self, now_s: float) -> LoadCounters:
        """Counters as of the last step that is over."""
        run = self._run
        steps = 0 if run is None or self._chunks else run.steps_done(now_s)
        return self._counters.told(run, steps)

    def busy_s(self, now_s: float) -> float:
        """How long it has worked, up to this moment."""
        under_way_s = 0.0 if self._run is None else max(now_s - self._run.start_s, 0.0)
        return self._counters.busy_s + under_way_s

    @property
    def gauges(self) -> LoadGauges:
        """How much is here at this moment. O(waiting requests)."""
        uncached = sum(
            work.request.isl_tokens - self._reusable_blocks(work.request) * self._block_size
            for work in self._waiting
        )
        return LoadGauges(self._admitted, len(self._waiting), uncached, self.cache.used_blocks)

    @property
    def constants(self) -> LoadConstants:
        """What never changes."""
        return LoadConstants(self._model.chunk_tokens, 0, self.cache.capacity_blocks)

    def _begin(self, now_s: float) -> None:
        if self._waiting:
            self._admit()
        requests = self._decoding
        if not (requests or self._prefilling):
            self._run, self.due_s = None, inf
            return
        step_s = self._model.step_s(self._plan_chunks(), requests, self._kv_tokens)
        growth_s = self._model.growth_s(requests)
        steps = 1 if self._chunks else self._milestones[0][0] - self._counters.steps
        slow = self.slowness
        run = Run(now_s, steps, step_s * slow, growth_s * slow, requests, self._kv_tokens)
        self._run, self.due_s = run, run.end_s

    def _admit(self) -> None:
        """Whoever is next and fits beside the running ones."""
        while self._waiting:
            work = self._waiting[0]
            request = work.request
            cached_blocks = self._reusable_blocks(request)
            further = self._blocks(request) - cached_blocks
            if not self.cache.take(request.sequence_hashes[:cached_blocks], further):
                return
            work.cached_blocks = cached_blocks
            work.computed_tokens = cached_blocks * self._block_size
            self._counters.cached_tokens += work.computed_tokens
            self._admitted += 1
            self._prefilling.append(self._waiting.popleft())

    def _plan_chunks(self) -> list[Chunk]:
        """What of prompts the next step computes: first in, first out."""
        room_tokens = self._model.chunk_tokens - self._decoding
        chunks: list[Chunk] = []
        for work in self._prefilling:
            if room_tokens <= 0:
                break
            tokens = min(work.request.isl_tokens - work.computed_tokens, room_tokens)
            self._chunks.append((work, tokens))
            chunks.append((tokens, work.computed_tokens))
            room_tokens -= tokens
        return chunks

    def _end_chunks(self, progress: Progress) -> None:
        for work, tokens in self._chunks:
            self._counters.add_chunk(tokens, work.computed_tokens)
            work.computed_tokens += tokens
            if work.computed_tokens == work.request.isl_tokens:
                self._prefilling.popleft()
                self.cache.name(work.request.sequence_hashes[work.cached_blocks :])
                progress.prefilled.append(work)
                self._begin_decoding(work, progress)
        self._chunks.clear()

    def _begin_decoding(self, work: Work, progress: Progress) -> None:
        """The prefill's last step has brought the first token."""
        request = work.request
        work.finish_step = self._counters.steps + request.osl_tokens - 1
        if request.osl_tokens == 1:
            self._finish(work, progress)
            return
        self._decoding += 1
        self._kv_tokens += request.isl_tokens + 1
        self._order += 1
        self._set_milestone(work, self._order, request.isl_tokens + 1)

    def _set_milestone(self, work: Work, order: int, tokens: int) -> None:
        """When the run ends for this request, at the latest: it is finished, or its output grows
        into another block.
        """
        step = work.finish_step
        if self._tells_growth:
            step = min(step, self._counters.steps + (-tokens % self._block_size) + 1)
        heappush(self._milestones, (step, order, work))

    def _pass_milestones(self, progress: Progress) -> None:
        milestones, now = self._milestones, self._counters.steps
        while milestones and milestones[0][0] == now:
            _, order, work = heappop(milestones)
            request = work.request
            if work.finish_step == now:
                self._decoding -= 1
                self._kv_tokens -= request.isl_tokens + request.osl_tokens
                self._finish(work, progress)
            else:
                progress.grown.append(work)
                left = work.finish_step - now
                tokens = request.isl_tokens + request.osl_tokens - left
                self._set_milestone(work, order, tokens)

    def _finish(self, work: Work, progress: Progress) -> None:
        request = work.request
        self._counters.finished += 1
        self._admitted -= 1
        named = len(request.sequence_hashes)
        self.cache.release(request.sequence_hashes, self._blocks(request) - named)
        progress.finished.append(work)

    def _blocks(self, request: TraceRequest) -> int:
        return -(-(request.isl_tokens + request.osl_tokens) // self._block_size)

    def _reusable_blocks(self, request: TraceRequest) -> int:
        """Cached leading blocks; at least one token is computed."""
        limit_blocks = (request.isl_tokens - 1) // self._block_size
        return self.cache.matching(request.sequence_hashes, limit_blocks)
