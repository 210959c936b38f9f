"""The execution of one rank of the engine: requests in, tokens out, block events published.

The engine computes on its own thread, one step at a time; between steps all state is on the event
loop. A step receives the requests since the last one, and returns its results.
"""

import asyncio
import time
from collections.abc import AsyncGenerator
from concurrent.futures import Executor
from contextlib import suppress

from router.errors import KvRouterError
from router.protocol.loads import LoadCounters, LoadGauges, LoadReport
from router.protocol.values import Rank, Tier
from router.publisher.event_publisher import KvEventPublisher
from router.publisher.load_publisher import LoadPublisher, ReceivedBeacons
from router.publisher.rank_queries import LocalIndex, RankQueryResponder
from worker_agent.blocks.changes import BlockRemoved, BlockStored, Change
from worker_agent.reference.engine.batching import GenerationRequest
from worker_agent.reference.engine.engine import Generated, ReferenceEngine, StepInput, StepOutput
from worker_agent.sharing.pushing import Steps


class EngineBusyError(KvRouterError):
    """More waiting requests on a rank than the limit allows."""

    code = "engine_busy"
    http_status = 429

    def __init__(self, limit: int) -> None:
        super().__init__(f"waiting requests: the limit is reached (allowed: {limit} per rank)")
        self.limit = limit


class RankRunner:
    """One rank; `run` owns the engine, and `generate` and `clear_cache` have any caller."""

    def __init__(
        self,
        rank: Rank,
        incarnation: int,
        engine: ReferenceEngine,
        events: KvEventPublisher,
        local_index: LocalIndex,
        load_subject: str,
        *,
        load_interval_s: float,
        max_waiting: int,
        beacons: ReceivedBeacons,
    ) -> None:
        self.rank = rank
        self.events = events
        self.loads = LoadPublisher(self._report, load_subject, interval_s=load_interval_s)
        self.answers = RankQueryResponder(rank, local_index, self._report)
        self.gauges = LoadGauges()
        self.counters = LoadCounters()
        self.constants = engine.constants
        self._incarnation = incarnation
        self._beacons = beacons
        self._report_count = 0
        self._engine = engine
        self._max_waiting = max_waiting
        self._streams: dict[str, asyncio.Queue[Generated]] = {}
        self._arrived = StepInput()
        self._work = asyncio.Event()
        self.steps = Steps()
        """The steps that computed blocks."""

    @property
    def request_count(self) -> int:
        """The number of requests with a caller that waits for tokens."""
        return len(self._streams)

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Generated, None]:
        """Return the tokens of a request as they come; closing the generator aborts it.

        Raises EngineBusyError, at once.
        """
        waiting = self.gauges.waiting_requests + len(self._arrived.added)
        if waiting >= self._max_waiting:
            raise EngineBusyError(self._max_waiting)
        stream: asyncio.Queue[Generated] = asyncio.Queue(request.max_tokens)
        self._streams[request.request_id] = stream
        self._arrived.added.append(request)
        self._work.set()
        return self._tokens(request.request_id, stream)

    def clear_cache(self) -> None:
        """Drop all cached prefixes in the next step."""
        self._arrived.clear_cache = True
        self._work.set()

    def wake(self) -> None:
        """Run a step, even without anything to compute: blocks were released."""
        self._work.set()

    async def run(self, executor: Executor) -> None:
        """Run steps on the executor until cancelled."""
        loop = asyncio.get_running_loop()

        def wake() -> None:
            with suppress(RuntimeError):  # the tier may outlive the loop
                loop.call_soon_threadsafe(self.wake)

        self._engine.on_change(wake)
        self.wake()  # tiers may have reported changes before
        wait_s: float | None = None
        while True:
            await self._wait(wait_s)
            arrived, self._arrived = self._arrived, StepInput()
            output = await loop.run_in_executor(executor, self._engine.step, arrived)
            if output.has_work:
                self._work.set()
            wait_s = output.wait_s
            self._take(output)

    async def _wait(self, timeout_s: float | None) -> None:
        """Wait until there is work, or the timeout."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._work.wait()
        self._work.clear()

    async def _tokens(
        self, request_id: str, stream: asyncio.Queue[Generated]
    ) -> AsyncGenerator[Generated, None]:
        is_last = False
        try:
            while not is_last:
                generated = await stream.get()
                is_last = generated.is_last
                yield generated
        finally:
            if self._streams.pop(request_id, None) is not None:
                self._arrived.aborted.append(request_id)
                self._work.set()

    def _take(self, output: StepOutput) -> None:
        for each in output.tier_changes:
            self._publish(each.tier, each.change)
        for change in output.changes:
            self._publish(Tier.DEVICE, change)
        if output.changes:
            self.steps.note()
        for generated in output.generated:
            self._hand_over(generated)
        if output.gauges != self.gauges or output.changes or output.tier_changes:
            self.loads.changed()
        self.gauges, self.counters = output.gauges, output.counters

    def _hand_over(self, generated: Generated) -> None:
        """Pass a token to its caller, if it is still connected.

        The queue has space for all tokens of the request.
        """
        stream = self._streams.get(generated.request_id)
        if stream is not None:
            stream.put_nowait(generated)
            if generated.is_last:
                del self._streams[generated.request_id]

    def _publish(self, tier: Tier, change: Change) -> None:
        match change:
            case BlockStored(name):
                parent = name.parent_sequence_hash
                self.events.stored(tier, [name.sequence_hash], parent)
            case BlockRemoved(name):
                self.events.removed(tier, [name.sequence_hash])
            case _:
                self.events.cleared(tier)

    def _report(self) -> LoadReport:
        self._report_count += 1
        return LoadReport(
            worker_id=self.rank.worker_id,
            dp_rank=self.rank.dp_rank,
            agent_incarnation=self._incarnation,
            incarnation=self._incarnation,
            report_id=self._report_count,
            event_id=self.events.published.event_id,
            state=self.events.reported_state,
            waiting_s=self.events.waiting_s,
            heard=self._beacons.last(time.monotonic()),
            counters=self.counters,
            gauges=self.gauges,
            constants=self.constants,
        )
