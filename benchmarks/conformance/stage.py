"""The engines of one scenario: what they do, what they hold, and what is said of it."""

import asyncio
import time

import msgspec
import zmq.asyncio

from .engine import ZmqEngine
from .oracle import Oracle
from .place import Place
from .score import Compared, compare, failed
from .steps import Ask, CloseReplay, Prompt, Publish, PublishBytes, Restart, Scenario, Step
from .systems.base import Seat, System

CONNECT_S = 10.0


class CorpusError(Exception):
    """A scenario that states another truth than the oracle."""


class Stage:
    """The engines of one scenario, and what they hold."""

    def __init__(self, context: zmq.asyncio.Context, number: int, scenario: Scenario) -> None:
        self.scenario = scenario
        self._place = Place(number)
        self._oracle = Oracle([spec.reannounces for spec in scenario.engines])
        self._engines = [ZmqEngine(context, spec) for spec in scenario.engines]
        self._acted_s = time.monotonic()
        self.seats = [
            Seat(
                worker_id=1_000 * number + i + 1,
                model_name=f"scenario-{number}",
                events_endpoint=engine.endpoint,
                replay_endpoint=engine.replay_endpoint,
                reannounces=spec.reannounces,
            )
            for i, (engine, spec) in enumerate(zip(self._engines, scenario.engines, strict=True))
        ]

    async def act(self, step: Step) -> None:
        """An engine does something."""
        self._oracle.follow(step)
        match step:
            case Publish():
                events = [self._place.event(event) for event in step.events]
                rank = [] if step.rank is None else [step.rank]
                batch = [time.time(), events, *rank]
                payload = msgspec.msgpack.encode(batch)
                await self._engines[step.engine].publish(payload, step.arrives)
            case PublishBytes():
                await self._engines[step.engine].publish(step.payload)
            case Restart():
                await self._engines[step.engine].restart()
            case CloseReplay():
                await self._engines[step.engine].close_replay()
        self._acted_s = time.monotonic()

    def truth(self, ask: Ask) -> tuple[int, ...]:
        """By engine."""
        truth = self._oracle.cached_blocks(ask.prompt)
        if truth != ask.cached_blocks:
            raise CorpusError(f"{self.scenario.name}: says {ask.cached_blocks}, true is {truth}")
        return truth

    async def compared(self, system: System, prompt: Prompt, truth: tuple[int, ...]) -> Compared:
        """Ask a system once."""
        try:
            answer = await system.ask(self.seats, self._place.prompt(prompt))
        except Exception as error:  # noqa: BLE001  a system may fail in ways of its own
            return failed(truth, f"{type(error).__name__}: {error}")
        worker_ids = [seat.worker_id for seat in self.seats]
        return compare(answer, worker_ids, truth, system.answers_best_only)

    async def settled(self, settle_s: float) -> None:
        """Until it is so long since an engine did something."""
        await asyncio.sleep(max(0.0, self._acted_s + settle_s - time.monotonic()))

    async def until_heard_by(self, subscribers: int) -> None:
        """Until so many listen to every engine, or it takes too long."""
        waits = [engine.until_heard_by(subscribers, CONNECT_S) for engine in self._engines]
        await asyncio.gather(*waits)
        self._acted_s = time.monotonic()

    async def close(self) -> None:
        for engine in self._engines:
            await engine.close()
