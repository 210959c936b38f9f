"""A simulated engine: chunked prefill, continuous batching, a prefix cache.

    submit ─▶ waiting ─▶ prefilling ─▶ decoding ─▶ finished
                (its blocks fit)   (first token)

The engine has no clock: `due_s` is the end of the current run of steps, and the simulation calls
`advance` then. All requests of a run take part in the same steps, so the cost of a run depends on
the changes at its end, not on the tokens it computes.

A run of steps of one engine between two changes of its work.

In a run of only decode steps, each step takes a little longer than the one before, because every
request's context grows by a token. A run of any length has a closed form and costs as much as one
step.
"""

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from math import ceil, inf, sqrt

from msgspec import Struct

from router.protocol.loads import LoadConstants, LoadCounters, LoadGauges
from router.simulator.block_cache import BlockCache
from router.simulator.engine_model import Chunk, StepModel
from router.simulator.traces import TraceRequest


class Run(Struct, frozen=True, gc=False):
    """A run of `steps` steps from `start_s`.

    The first takes `first_step_s`, each following one `growth_s` longer. `requests` requests decode
    in each; in the first step their contexts have `kv_tokens` tokens in total.
    """

    start_s: float
    steps: int
    first_step_s: float
    growth_s: float
    requests: int
    kv_tokens: int

    @property
    def end_s(self) -> float:
        """The end of the last step."""
        return self.start_s + self.duration_s(self.steps)

    def duration_s(self, steps: int) -> float:
        """Return the duration of the first `steps` steps."""
        return steps * self.first_step_s + self.growth_s * (steps * (steps - 1) / 2)

    def resident_kv_tokens(self, steps: int) -> int:
        """Return the contexts of decoding requests, summed over the first `steps` steps."""
        return steps * self.kv_tokens + self.requests * (steps * (steps - 1) // 2)

    def steps_begun(self, now_s: float) -> int:
        """Return the number of steps completed or in progress, at least 1.

        O(1): the root of a parabola.
        """
        elapsed_s = now_s - self.start_s
        linear, square = self.first_step_s - self.growth_s / 2, self.growth_s / 2
        root = (sqrt(linear * linear + 4 * square * elapsed_s) + linear) / 2
        steps = max(ceil(elapsed_s / root), 1)
        while steps > 1 and self.duration_s(steps - 1) >= elapsed_s:
            steps -= 1
        while self.duration_s(steps) < elapsed_s:
            steps += 1
        return min(steps, self.steps)

    def steps_done(self, now_s: float) -> int:
        """Return the number of completed steps."""
        begun = self.steps_begun(now_s)
        return begun if self.start_s + self.duration_s(begun) <= now_s else begun - 1


class EngineCounters:
    """Sums over all completed steps and all requests; see `LoadCounters`.

    `finished_tokens`, `finished_s`: of finished requests, the tokens computed of their prompts, and
    the time of these from admission on; `finished_isl_tokens`: the lengths of the prompts.
    `output_steps`: steps that gave an output. `outputs_s`: the duration of steps, summed over the
    requests that decoded in them. `prompts`, `prompt_tokens`: those with their first token.
    `queried_tokens`: of admitted prompts.
    """

    __slots__ = (
        "_contexts",
        "_decode_requests",
        "_prefill_tokens",
        "_resident_kv_tokens",
        "busy_s",
        "cached_tokens",
        "finished",
        "finished_isl_tokens",
        "finished_s",
        "finished_tokens",
        "output_steps",
        "outputs_s",
        "prompt_tokens",
        "prompts",
        "queried_tokens",
        "received",
        "steps",
    )

    def __init__(self) -> None:
        self.output_steps = self.prompts = self.prompt_tokens = self.queried_tokens = 0
        self.outputs_s = self.finished_s = 0.0
        self.finished_tokens = 0
        self.finished_isl_tokens: list[int] = []
        self.steps = self.received = self.finished = self.cached_tokens = 0
        self._prefill_tokens = self._decode_requests = self._resident_kv_tokens = 0
        self.busy_s = self._contexts = 0.0

    def add_run(self, run: Run) -> None:
        """Add a completed run of steps."""
        self.steps += run.steps
        self.busy_s += run.duration_s(run.steps)
        self.outputs_s += run.requests * run.duration_s(run.steps)
        self.output_steps += run.steps if run.requests else 0
        self._decode_requests += run.requests * run.steps
        self._resident_kv_tokens += run.resident_kv_tokens(run.steps)

    def add_chunk(self, tokens: int, context_tokens: int) -> None:
        """Add a computed chunk of a prompt after `context_tokens` tokens."""
        self._prefill_tokens += tokens
        self._contexts += tokens * (context_tokens + tokens / 2)

    def end_prompts(self, works: Sequence["Work"], block_size: int, run: Run) -> None:
        """Count prompts with their first token, which end a run."""
        self.prompts += len(works)
        self.output_steps += bool(works) and not run.requests
        self.prompt_tokens += sum(
            w.request.isl_tokens - w.cached_blocks * block_size for w in works
        )

    def end_request(self, work: "Work", block_size: int) -> None:
        """Count a finished request."""
        self.finished += 1
        self.finished_tokens += work.request.isl_tokens - work.cached_blocks * block_size
        self.finished_s += work.prefilled_s - work.admitted_s
        self.finished_isl_tokens.append(work.request.isl_tokens)

    def counters_after(self, run: Run | None, steps: int) -> LoadCounters:
        """Return the counters, including the first `steps` steps of a run in progress."""
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


class ObservedEngine(Struct, frozen=True):
    """What an engine shows of itself; the last three as of the beginning of the present step."""

    counters: LoadCounters
    output_steps: int
    outputs_s: float
    prompts: int
    prompt_tokens: int
    finished_isl_tokens: Sequence[int]
    finished_tokens: int
    finished_s: float
    queried_tokens: int
    hit_tokens: int
    gauges: LoadGauges


class Work:
    """A request in an engine; `caller` is the index of its client."""

    __slots__ = (
        "admitted_s",
        "cached_blocks",
        "caller",
        "computed_tokens",
        "finish_step",
        "prefilled_s",
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
        self.admitted_s = self.prefilled_s = 0.0


class Progress(Struct, gc=False):
    """The results of a run of steps.

    `grown`: requests with output that needs one more block from now on; they have it already.
    `decoded_tokens` and `mean_step_s`: as seen by the requests that decoded in the run.
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
        "_reports_growth",
        "_run",
        "_shown",
        "_waiting",
        "cache",
        "due_s",
        "slowness",
    )

    def __init__(self, model: StepModel, block_size: int, *, reports_growth: bool) -> None:
        self._model = model
        self._block_size = block_size
        self._reports_growth = reports_growth
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
        self._shown = (0, 0, LoadGauges())

    def fits(self, request: TraceRequest) -> bool:
        """Return whether the cache is large enough for the request."""
        return self._blocks(request) <= self.cache.capacity_blocks

    def submit(self, work: Work, now_s: float) -> None:
        """Add a request that `fits`; it takes part from the next step on."""
        self._counters.received += 1
        self._waiting.append(work)
        self.interrupt(now_s)

    def interrupt(self, now_s: float) -> None:
        """End the current run after the step in progress, because something changes."""
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
        self._counters.end_prompts(progress.prefilled, self._block_size, run)
        self._begin(now_s)
        return progress

    def works(self) -> list[Work]:
        """Return all requests in the engine, in no particular order."""
        return [*self._waiting, *self._prefilling, *(work for _, _, work in self._milestones)]

    def counters(self, now_s: float) -> LoadCounters:
        """Return the counters as of the last completed step."""
        run = self._run
        steps = 0 if run is None or self._chunks else run.steps_done(now_s)
        return self._counters.counters_after(run, steps)

    def busy_s(self, now_s: float) -> float:
        """Return the seconds worked up to this moment."""
        under_way_s = 0.0 if self._run is None else max(now_s - self._run.start_s, 0.0)
        return self._counters.busy_s + under_way_s

    def observed(self, now_s: float) -> "ObservedEngine":
        """Return what the engine shows: counters and gauges as of the last completed step."""
        run, total = self._run, self._counters
        steps = 0 if run is None or self._chunks else run.steps_done(now_s)
        counters = total.counters_after(run, steps)
        outputs_s = total.outputs_s
        if run is not None and steps:
            outputs_s += run.requests * run.duration_s(steps)
        output_steps = total.output_steps + (steps if run is not None and run.requests else 0)
        totals = (output_steps, outputs_s, total.prompts, total.prompt_tokens)
        ended = (total.finished_isl_tokens, total.finished_tokens, total.finished_s)
        return ObservedEngine(counters, *totals, *ended, *self._shown)

    @property
    def gauges(self) -> LoadGauges:
        """The current gauges. O(waiting requests)."""
        uncached = sum(
            work.request.isl_tokens - self._reusable_blocks(work.request) * self._block_size
            for work in self._waiting
        )
        return LoadGauges(self._admitted, len(self._waiting), uncached, self.cache.used_blocks)

    @property
    def constants(self) -> LoadConstants:
        """The constants of the engine."""
        return LoadConstants(self._model.chunk_tokens, 0, self.cache.capacity_blocks)

    def _begin(self, now_s: float) -> None:
        total = self._counters
        self._shown = (
            total.queried_tokens,
            total.cached_tokens,
            LoadGauges(self._admitted, len(self._waiting), 0, self.cache.used_blocks),
        )
        if self._waiting:
            self._admit(now_s)
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

    def _admit(self, now_s: float) -> None:
        """Admit waiting requests in order, while their blocks fit."""
        while self._waiting:
            work = self._waiting[0]
            request = work.request
            cached_blocks = self._reusable_blocks(request)
            further = self._blocks(request) - cached_blocks
            if not self.cache.take(request.sequence_hashes[:cached_blocks], further):
                return
            work.admitted_s, work.cached_blocks = now_s, cached_blocks
            work.computed_tokens = cached_blocks * self._block_size
            self._counters.cached_tokens += work.computed_tokens
            self._counters.queried_tokens += request.isl_tokens
            self._admitted += 1
            self._prefilling.append(self._waiting.popleft())

    def _plan_chunks(self) -> list[Chunk]:
        """Plan the prompt tokens of the next step: first in, first out."""
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
                work.prefilled_s = self.due_s
                self.cache.name(work.request.sequence_hashes[work.cached_blocks :])
                progress.prefilled.append(work)
                self._begin_decoding(work, progress)
        self._chunks.clear()

    def _begin_decoding(self, work: Work, progress: Progress) -> None:
        """Start decoding a request; the last prefill step has produced its first token."""
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
        """Schedule the last step at which the run must end for this request.

        The run ends when the request is finished, or when its output needs another block.
        """
        step = work.finish_step
        if self._reports_growth:
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
        self._counters.end_request(work, self._block_size)
        self._admitted -= 1
        named = len(request.sequence_hashes)
        self.cache.release(request.sequence_hashes, self._blocks(request) - named)
        progress.finished.append(work)

    def _blocks(self, request: TraceRequest) -> int:
        return -(-(request.isl_tokens + request.osl_tokens) // self._block_size)

    def _reusable_blocks(self, request: TraceRequest) -> int:
        """Return the cached leading blocks, leaving at least one token to compute."""
        limit_blocks = (request.isl_tokens - 1) // self._block_size
        return self.cache.matching(request.sequence_hashes, limit_blocks)
