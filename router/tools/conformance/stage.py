"""The engines of one scenario: their actions, their caches, and answers about them."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import zmq.asyncio

from router.tools.conformance.engine import ZmqEngine
from router.tools.conformance.oracle import Oracle
from router.tools.conformance.place import Place
from router.tools.conformance.score import Compared, compare, failed
from router.tools.conformance.steps import (
    Ask,
    CloseReplay,
    Event,
    Marks,
    Prompt,
    Publish,
    PublishBytes,
    Restart,
    Scenario,
    Step,
)
from router.tools.conformance.systems.base import Seat, System

CONNECT_S = 10.0


class CorpusError(Exception):
    """A scenario that states another truth than the model of the engine."""


class Stage:
    """The engines of one scenario, and what they hold.

    Each engine publishes once for each form of salts and images, on sockets of its own; all systems
    with the same form are subscribed to the same sockets.
    """

    def __init__(
        self, context: zmq.asyncio.Context, number: int, scenario: Scenario, forms: Sequence[Marks]
    ) -> None:
        self.scenario = scenario
        self._place = Place(number)
        self._oracle = Oracle(scenario.engines)
        self._engines = {
            marks: [ZmqEngine(context, spec) for spec in scenario.engines] for marks in forms
        }
        self._acted_s = time.monotonic()
        self.worker_ids = [1_000 * number + i + 1 for i in range(len(scenario.engines))]
        self._model_name = f"scenario-{number}"

    def seats(self, marks: Marks) -> list[Seat]:
        """Return the engines as a system with this form sees them."""
        return [
            Seat(
                worker_id=worker_id,
                model_name=self._model_name,
                events_endpoint=engine.endpoint,
                replay_endpoint=engine.replay_endpoint,
                kind=spec.kind,
                reannounces=spec.reannounces,
                restarts=any(
                    isinstance(step, Restart) and step.engine == i for step in self.scenario.steps
                ),
                chunk_tokens=spec.chunk_tokens,
            )
            for i, (worker_id, engine, spec) in enumerate(
                zip(self.worker_ids, self._engines[marks], self.scenario.engines, strict=True)
            )
        ]

    async def act(self, step: Step) -> None:
        """Let an engine do something."""
        self._oracle.follow(step)
        for marks, engines in self._engines.items():
            match step:
                case Publish():
                    payload = self._payload(step, marks)
                    await engines[step.engine].publish(payload, step.arrives)
                case PublishBytes():
                    await engines[step.engine].publish(step.payload)
                case Restart():
                    await engines[step.engine].restart()
                case CloseReplay():
                    await engines[step.engine].close_replay()
        self._acted_s = time.monotonic()

    def _payload(self, step: Publish, marks: Marks) -> bytes:
        events = [_marked(self._place.event(event), marks) for event in step.events]
        rank = [] if step.rank is None else [step.rank]
        return msgspec.msgpack.encode([time.time(), events, *rank])

    def truth(self, ask: Ask) -> tuple[int, ...]:
        """Return the leading cached blocks, by engine. Raises CorpusError if `ask` differs."""
        if any(spec.is_hybrid for spec in self.scenario.engines):
            return ask.cached_blocks
        truth = self._oracle.cached_blocks(ask.prompt)
        if truth != ask.cached_blocks:
            raise CorpusError(
                f"{self.scenario.name}: states {ask.cached_blocks}, the model holds {truth}"
            )
        return truth

    async def compared(self, system: System, prompt: Prompt, truth: tuple[int, ...]) -> Compared:
        """Ask a system once."""
        try:
            answer = await system.ask(self.seats(system.marks), self._place.prompt(prompt))
        except Exception as error:  # noqa: BLE001  a system may fail in ways of its own
            return failed(truth, f"{type(error).__name__}: {error}")
        return compare(answer, self.worker_ids, truth, system.answers_best_only)

    async def settled(self, settle_s: float) -> None:
        """Wait until `settle_s` after the last action of an engine."""
        await asyncio.sleep(max(0.0, self._acted_s + settle_s - time.monotonic()))

    async def until_subscribed(self, subscribers: Mapping[Marks, int]) -> None:
        """Wait until each engine has its subscribers, or it takes too long."""
        waits = [
            engine.until_subscribed(subscribers.get(marks, 0), CONNECT_S)
            for marks, engines in self._engines.items()
            for engine in engines
        ]
        await asyncio.gather(*waits)
        self._acted_s = time.monotonic()

    async def close(self) -> None:
        """Close all sockets."""
        for engines in self._engines.values():
            for engine in engines:
                await engine.close()


def _marked(event: Event, marks: Marks) -> Any:
    """Return an event with its salts and images in the form of a system."""
    match event:
        case {"extra_keys": [*keys]}:
            return event | {"extra_keys": marks.written(keys)}
        case [*values]:
            return marks.written(values)
    return event
