"""A simulated engine: chunked prefill, continuous batching, a prefix cache.

    submit ─▶ waiting ─▶ prefilling ─▶ decoding ─▶ finished
                (its blocks fit)   (first token)

The engine has no clock: `due_s` is the end of the current run of steps, and the simulation calls
`advance` then. All requests of a run take part in the same steps, so the cost of a run depends on
the changes at its end, not on the tokens it computes.
"""

from collections import deque
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from math import inf
from random import Random

from msgspec.structs import replace

from router.protocol.loads import LoadConstants, LoadCounters, LoadGauges
from router.simulator.block_cache import BlockCache, Checkpoints, LayerGroups
from router.simulator.disturbances import CALM, Disturbances, StepLoad, StepTimes
from router.simulator.engine_model import Chunk, StepModel
from router.simulator.engine_runs import EngineCounters, ObservedEngine, Progress, Run, Work
from router.simulator.traces import TraceRequest


class Engine:
    """One engine, in one life. `rng` draws its disturbances.

    `layers`: those of a hybrid model that are not full attention; blocks of all come from one pool.
    Without preemption a request is admitted if its whole output fits as well, and keeps its blocks.
    """

    __slots__ = (
        "_admitted",
        "_block_size",
        "_chunks",
        "_counters",
        "_decoding",
        "_growing",
        "_grown_tokens",
        "_is_deferring",
        "_is_preempting",
        "_kv_tokens",
        "_milestones",
        "_order",
        "_prefilling",
        "_reports_growth",
        "_run",
        "_shown",
        "_times",
        "_waiting",
        "cache",
        "checkpoints",
        "chunk_tokens",
        "due_s",
    )

    def __init__(
        self,
        model: StepModel,
        block_size: int,
        *,
        layers: Sequence[LayerGroups] = (),
        reports_growth: bool = False,
        disturbances: Disturbances = CALM,
        rng: Random | None = None,
    ) -> None:
        self._times = StepTimes(model, disturbances, rng or Random(0))
        self._is_preempting = disturbances.is_preempting
        self._is_deferring = disturbances.is_deferring
        self._block_size = block_size
        self._reports_growth = reports_growth
        self.chunk_tokens = model.chunk_tokens
        self.cache = BlockCache(model.capacity_tokens // block_size)
        self.checkpoints = Checkpoints(layers, block_size)
        self.due_s = inf
        self._run: Run | None = None
        self._chunks: list[tuple[Work, int]] = []
        self._waiting: deque[Work] = deque()
        self._prefilling: deque[Work] = deque()
        self._milestones: list[tuple[int, int, Work]] = []
        self._growing: list[Work] = []
        self._order = self._decoding = self._admitted = 0
        self._kv_tokens = self._grown_tokens = 0
        self._counters = EngineCounters()
        self._shown = (0, 0, LoadGauges())

    @property
    def slowness(self) -> float:
        """The factor of the duration of steps, from the next run on."""
        return self._times.slowness

    @slowness.setter
    def slowness(self, slowness: float) -> None:
        self._times.slowness = slowness

    def fits(self, request: TraceRequest) -> bool:
        """Return whether the cache is large enough for the request."""
        tokens = request.isl_tokens + request.osl_tokens
        blocks = self._blocks(tokens) + self.checkpoints.most_blocks
        return blocks <= self.cache.capacity_blocks

    def submit(self, work: Work, now_s: float) -> None:
        """Add a request that `fits`; it takes part from the next step on."""
        work.step_tokens = self._times.tokens_a_step()
        self._counters.received += 1
        self._waiting.append(work)
        self.interrupt(now_s)

    def interrupt(self, now_s: float) -> None:
        """End the current run after the step in progress, because something changes."""
        if self._run is None:
            self._begin(now_s)
        elif self._run.steps > 1:
            self._run = replace(self._run, steps=self._run.steps_begun(now_s))
            self.due_s = self._run.end_s

    def advance(self) -> Progress:
        """End the run that is due, and begin the next one."""
        run, now_s = self._run, self.due_s
        assert run is not None
        decoded_tokens = run.grown_tokens * run.steps
        self._counters.add_run(run)
        self._kv_tokens += decoded_tokens
        gap_s = run.requests * run.duration_s(run.steps) / max(decoded_tokens, 1)
        progress = Progress(decoded_tokens, gap_s)
        self._pass_milestones(progress)
        self._end_chunks(progress)
        self._counters.end_prompts(progress, self._block_size, run)
        self._extend_blocks()
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
        generated = total.generated_tokens
        generated += 0 if run is None else steps * run.grown_tokens
        prompts = (total.prompt_tokens, total.found_tokens)
        totals = (output_steps, outputs_s, generated, total.preemptions, *prompts)
        ended = (total.finished_isl_tokens, total.finished_tokens, total.finished_s)
        return ObservedEngine(counters, *totals, *ended, *self._shown)

    @property
    def gauges(self) -> LoadGauges:
        """The current gauges. O(waiting requests)."""
        uncached = sum(
            work.prompt_tokens - self._reusable_blocks(work) * self._block_size
            for work in self._waiting
        )
        return LoadGauges(self._admitted, len(self._waiting), uncached, self.cache.used_blocks)

    @property
    def constants(self) -> LoadConstants:
        """The constants of the engine."""
        return LoadConstants(self.chunk_tokens, 0, self.cache.capacity_blocks)

    def _begin(self, now_s: float) -> None:
        total = self._counters
        self._shown = (
            total.queried_tokens,
            total.cached_tokens,
            LoadGauges(self._admitted, len(self._waiting), 0, self.cache.used_blocks),
        )
        if self._waiting and self._is_deferring:
            self._admit_late(now_s)
        elif self._waiting:
            while self._waiting and self._admit(now_s):
                pass
        requests = self._decoding
        if not (requests or self._prefilling):
            self._run, self.due_s = None, inf
            return
        load = StepLoad(self._plan_chunks(), requests, self._kv_tokens, self._grown_tokens)
        done = self._counters.steps
        steps = 1 if self._chunks else self._milestones[0][0] - done
        planned = self._times.planned(load, steps, done, now_s)
        self._run = Run(now_s, *planned, requests, self._kv_tokens, self._grown_tokens)
        self.due_s = self._run.end_s

    def _admit(self, now_s: float) -> bool:
        """Admit the first waiting request; return False if its blocks do not fit."""
        work = self._waiting[0]
        request, hashes = work.request, work.request.sequence_hashes
        full_blocks = self._matching_blocks(work)
        cached_blocks = self.checkpoints.resumable(self.cache, hashes, full_blocks)
        kept = list(self.checkpoints.names(hashes, cached_blocks))
        further = self._blocks_to_admit(work) - cached_blocks + self.checkpoints.running_blocks
        if full_blocks > cached_blocks:
            further += self.checkpoints.blocks_of_one
        if not self.cache.take([*hashes[:cached_blocks], *kept], further):
            return False
        work.cached_blocks, work.full_blocks, work.kept = cached_blocks, full_blocks, kept
        work.blocks, work.is_named = cached_blocks + len(kept) + further, False
        work.computed_tokens = cached_blocks * self._block_size
        if not work.is_preempted:
            work.admitted_s, work.found_blocks = now_s, cached_blocks
            self._counters.cached_tokens += work.computed_tokens
            self._counters.queried_tokens += request.isl_tokens
        self._admitted += 1
        self._prefilling.append(self._waiting.popleft())
        return True

    def _admit_late(self, now_s: float) -> None:
        """Admit waiting requests in order, while the next step has room for one token of theirs.

        A prompt that the next step completes is found from now on. O(prompts being computed).
        """
        room_tokens = self._times.room_tokens(self._decoding)
        for work in self._prefilling:
            room_tokens = self._room_after(work, room_tokens)
        while self._waiting and room_tokens > 0 and self._admit(now_s):
            room_tokens = self._room_after(self._prefilling[-1], room_tokens)

    def _room_after(self, work: Work, room_tokens: int) -> int:
        """Return the room that a prompt leaves in the next step; below 0 if it does not fit."""
        room_tokens -= work.prompt_tokens - work.computed_tokens
        if room_tokens >= 0:
            self._name(work)
        return room_tokens

    def _name(self, work: Work) -> None:
        """Let later requests find the blocks of a prompt, and resume at its checkpoints."""
        if work.is_named:
            return
        work.is_named = True
        request, names = work.request, self.checkpoints.names
        hashes = request.sequence_hashes
        last = min((request.isl_tokens - 1) // self._block_size, len(hashes))
        ends = (last,) if work.full_blocks == work.cached_blocks else (work.full_blocks, last)
        kept = list(dict.fromkeys(name for end in ends for name in names(hashes, end)))
        new = [name for name in kept if name not in work.kept]
        self.cache.name([*hashes[work.cached_blocks :], *new])
        behind = [name for name in work.kept if name not in kept]
        self.cache.release(behind, 0)
        work.kept, work.blocks = kept, work.blocks - len(behind)

    def _blocks_to_admit(self, work: Work) -> int:
        """Return the blocks of its context with the next output, or with all of its output."""
        all_tokens = work.request.isl_tokens + work.request.osl_tokens
        return self._blocks(work.prompt_tokens + 1 if self._is_preempting else all_tokens)

    def _plan_chunks(self) -> list[Chunk]:
        """Plan the prompt tokens of the next step: first in, first out."""
        room_tokens = self._times.room_tokens(self._decoding)
        chunks: list[Chunk] = []
        for work in self._prefilling:
            if room_tokens <= 0:
                break
            tokens = min(work.prompt_tokens - work.computed_tokens, room_tokens)
            self._chunks.append((work, tokens))
            chunks.append((tokens, work.computed_tokens))
            room_tokens -= tokens
        return chunks

    def _end_chunks(self, progress: Progress) -> None:
        for work, tokens in self._chunks:
            self._counters.add_chunk(tokens, work.computed_tokens)
            work.computed_tokens += tokens
            if work.computed_tokens == work.prompt_tokens:
                self._prefilling.popleft()
                self._name(work)
                self._begin_decoding(work, progress)
        self._chunks.clear()

    def _begin_decoding(self, work: Work, progress: Progress) -> None:
        """Start decoding a request; the last prefill step has produced a token."""
        if work.prefilled_s:
            progress.recomputed.append(work)
        else:
            work.prefilled_s = self.due_s
            progress.prefilled.append(work)
        left_tokens = work.request.osl_tokens - work.kept_tokens - 1
        if not left_tokens:
            self._finish(work, progress)
            return
        self._order += 1
        work.order, work.began_step = self._order, self._counters.steps
        work.finish_step = work.began_step + -(-left_tokens // work.step_tokens)
        self._decoding += 1
        self._grown_tokens += work.step_tokens
        self._kv_tokens += work.prompt_tokens + 1
        self._set_milestone(work)

    def _set_milestone(self, work: Work) -> None:
        """Schedule the last step at which the run must end for this request.

        The run ends when the request is finished, or when its output needs another block.
        """
        step = work.finish_step
        if self._reports_growth or self._is_preempting:
            now = self._counters.steps
            left_tokens = -work.tokens(now) % self._block_size + 1
            step = min(step, now + -(-left_tokens // work.step_tokens))
        heappush(self._milestones, (step, work.order, work))

    def _pass_milestones(self, progress: Progress) -> None:
        milestones, now = self._milestones, self._counters.steps
        while milestones and milestones[0][0] == now:
            _, _, work = heappop(milestones)
            if work.finish_step == now:
                self._stop_decoding(work)
                self._finish(work, progress)
                continue
            self._set_milestone(work)
            if self._reports_growth:
                progress.grown.append(work)
            if self._is_preempting:
                self._growing.append(work)

    def _stop_decoding(self, work: Work) -> None:
        self._decoding -= 1
        self._grown_tokens -= work.step_tokens
        self._kv_tokens -= work.tokens(self._counters.steps)

    def _finish(self, work: Work, progress: Progress) -> None:
        self._counters.end_request(work, self._block_size)
        self._admitted -= 1
        self._release(work, work.request.sequence_hashes)
        progress.finished.append(work)

    def _release(self, work: Work, sequence_hashes: Sequence[int]) -> None:
        """Release all blocks of a request, of which these have names, and those of other layers."""
        names = [*sequence_hashes, *work.kept]
        self.cache.release(names, work.blocks - len(names))
        work.kept = []

    # ── Preemption ──────────────────────────────────────────────────────────────────────────────

    def _extend_blocks(self) -> None:
        """Give a block to each request that needs one more, or take all from the last admitted."""
        for work in self._growing:
            while work.blocks and not self.cache.take((), 1):
                self._preempt(self._last_admitted())
            if work.blocks:
                work.blocks += 1
        self._growing.clear()

    def _last_admitted(self) -> Work:
        """Return the last of the prompts, else of the decoding requests. O(decoding requests)."""
        if self._prefilling:
            return self._prefilling[-1]
        return max(self._milestones, key=lambda milestone: milestone[1])[2]

    def _preempt(self, work: Work) -> None:
        """Put a request back to the front of the queue, without its blocks. O(requests)."""
        hashes = work.request.sequence_hashes
        if self._prefilling:
            self._prefilling.pop()
            hashes = hashes[: work.cached_blocks]
        else:
            self._milestones = [each for each in self._milestones if each[2] is not work]
            heapify(self._milestones)
            self._stop_decoding(work)
            work.kept_tokens = work.tokens(self._counters.steps) - work.request.isl_tokens
        self._release(work, hashes)
        work.blocks, work.is_preempted = 0, True
        self._counters.preemptions += 1
        self._admitted -= 1
        self._waiting.appendleft(work)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._block_size)

    def _matching_blocks(self, work: Work) -> int:
        """Return the leading blocks in full attention, leaving at least one token to compute."""
        limit_blocks = (work.prompt_tokens - 1) // self._block_size
        return self.cache.matching(work.request.sequence_hashes, limit_blocks)

    def _reusable_blocks(self, work: Work) -> int:
        """Return the leading blocks that need not be computed."""
        hashes = work.request.sequence_hashes
        return self.checkpoints.resumable(self.cache, hashes, self._matching_blocks(work))
