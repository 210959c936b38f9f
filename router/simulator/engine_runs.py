"""The work of a simulated engine: its runs of steps, its requests, and what is counted of both.

A run is a number of steps between two changes of the engine's work. In a run of only decode steps,
each step takes a little longer than the one before, because every request's context grows by a
token. A run of any length has a closed form and costs as much as one step.
"""

from collections.abc import Sequence
from math import ceil, sqrt

from msgspec import Struct

from router.protocol.loads import LoadCounters, LoadGauges
from router.simulator.traces import TraceRequest


class Run(Struct, frozen=True, gc=False):
    """A run of `steps` steps from `start_s`.

    The first takes `first_step_s`, each following one `growth_s` longer. `requests` requests decode
    in each; in the first step their contexts have `kv_tokens` tokens in total, and each step gives
    them `grown_tokens` more.
    """

    start_s: float
    steps: int
    first_step_s: float
    growth_s: float
    requests: int
    kv_tokens: int
    grown_tokens: int

    @property
    def end_s(self) -> float:
        """The end of the last step."""
        return self.start_s + self.duration_s(self.steps)

    def duration_s(self, steps: int) -> float:
        """Return the duration of the first `steps` steps."""
        return steps * self.first_step_s + self.growth_s * (steps * (steps - 1) / 2)

    def resident_kv_tokens(self, steps: int) -> int:
        """Return the contexts of decoding requests, summed over the first `steps` steps."""
        return steps * self.kv_tokens + self.grown_tokens * (steps * (steps - 1) // 2)

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

    `generated_tokens`: with first tokens. `finished_tokens`, `finished_s`: of finished requests,
    the tokens computed of their prompts, and the time of these from admission on;
    `finished_isl_tokens`: the lengths of the prompts. `output_steps`: steps that gave an output.
    `outputs_s`: the duration of steps, summed over the requests that decoded in them.
    `prompt_tokens`, `found_tokens`: computed and cached ones of prompts with their first token.
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
        "found_tokens",
        "generated_tokens",
        "output_steps",
        "outputs_s",
        "preemptions",
        "prompt_tokens",
        "queried_tokens",
        "received",
        "steps",
    )

    def __init__(self) -> None:
        self.output_steps = self.prompt_tokens = self.found_tokens = self.queried_tokens = 0
        self.outputs_s = self.finished_s = 0.0
        self.finished_tokens = self.generated_tokens = self.preemptions = 0
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
        self.generated_tokens += run.grown_tokens * run.steps
        self._decode_requests += run.requests * run.steps
        self._resident_kv_tokens += run.resident_kv_tokens(run.steps)

    def add_chunk(self, tokens: int, context_tokens: int) -> None:
        """Add a computed chunk of a prompt after `context_tokens` tokens."""
        self._prefill_tokens += tokens
        self._contexts += tokens * (context_tokens + tokens / 2)

    def end_prompts(self, progress: "Progress", block_size: int, run: Run) -> None:
        """Count prompts with their first token, and those computed again, which end a run."""
        works = progress.prefilled
        outputs = len(works) + len(progress.recomputed)
        self.generated_tokens += outputs
        self.output_steps += bool(outputs) and not run.requests
        self.prompt_tokens += sum(work.uncached_tokens(block_size) for work in works)
        self.found_tokens += sum(work.found_blocks for work in works) * block_size

    def end_request(self, work: "Work", block_size: int) -> None:
        """Count a finished request."""
        self.finished += 1
        self.finished_tokens += work.uncached_tokens(block_size)
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
    """The visible state of an engine; the last three as of the beginning of the present step."""

    counters: LoadCounters
    output_steps: int
    outputs_s: float
    generated_tokens: int
    preemptions: int
    prompt_tokens: int
    found_tokens: int
    finished_isl_tokens: Sequence[int]
    finished_tokens: int
    finished_s: float
    queried_tokens: int
    hit_tokens: int
    gauges: LoadGauges


class Work:
    """A request in an engine; `caller` is the index of its client, or -1 if it has none.

    `cached_blocks`: those after which it resumed when it was admitted last, of `full_blocks` found
    in full attention; `found_blocks`: when it was admitted first. `blocks`: those that it has, of
    all layers; `kept`: the named ones that are not full attention's. `kept_tokens`: output of the
    time before it was preempted, which is computed again like a prompt. `is_named`: others can find
    the blocks of its prompt.
    """

    __slots__ = (
        "admitted_s",
        "began_step",
        "blocks",
        "cached_blocks",
        "caller",
        "computed_tokens",
        "finish_step",
        "found_blocks",
        "full_blocks",
        "is_named",
        "is_preempted",
        "kept",
        "kept_tokens",
        "order",
        "prefilled_s",
        "request",
        "request_id",
        "step_tokens",
    )

    def __init__(self, caller: int, request_id: str, request: TraceRequest) -> None:
        self.caller = caller
        self.request_id = request_id
        self.request = request
        self.cached_blocks = self.found_blocks = self.full_blocks = self.blocks = 0
        self.kept: list[int] = []
        self.computed_tokens = self.kept_tokens = 0
        self.began_step = self.finish_step = self.order = 0
        self.step_tokens = 1
        self.admitted_s = self.prefilled_s = 0.0
        self.is_preempted = self.is_named = False

    @property
    def prompt_tokens(self) -> int:
        """The tokens to have before the next output."""
        return self.request.isl_tokens + self.kept_tokens

    def tokens(self, step: int) -> int:
        """Return the length of its context after this step of its engine, if it decodes."""
        return self.prompt_tokens + 1 + self.step_tokens * (step - self.began_step)

    def uncached_tokens(self, block_size: int) -> int:
        """Return the tokens of its prompt that were not found when it was admitted first."""
        return self.request.isl_tokens - self.found_blocks * block_size


class Progress(Struct, gc=False):
    """The results of a run of steps.

    `prefilled`: with their first token; `recomputed`: with another one, after a preemption.
    `grown`: requests with output that needs one more block from now on; they have it already.
    `decoded_tokens` and `mean_gap_s`: of the requests that decoded in the run.
    """

    decoded_tokens: int
    mean_gap_s: float
    prefilled: list[Work] = []
    recomputed: list[Work] = []
    grown: list[Work] = []
    finished: list[Work] = []
