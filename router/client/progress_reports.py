"""Batched reports of reservation steps to a router.

    step ─▶ queue ─a few milliseconds─▶ reservations:batch ─▶ the result of each, to its reporter

This costs a router a tenth of a call per request, and no request waits for it. There is one call at
a time, so steps arrive in the order in which they were reported.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from random import Random
from typing import Protocol, TypeAlias

from msgspec import Struct

from router.client.errors import UnansweredError, rebuilt
from router.client.settings import Retries
from router.errors import KvRouterError
from router.protocol.batches import MAX_STEPS, ItemResult, ReservationStep

EVERY_S = 0.005
"""The delay between two calls, which is a router's time for 30 steps sent one by one."""

FINISH_S = 1.0
"""The time that `finish` waits for delayed steps."""

OnResult: TypeAlias = Callable[[KvRouterError | None], None]
Send: TypeAlias = Callable[[Sequence[ReservationStep]], Awaitable[list[ItemResult]]]


class Step(Struct, frozen=True, eq=False):
    """A step to report.

    `heard` is called once, with its error or None. `is_repeatable`: sending it twice is harmless.
    """

    step: ReservationStep
    heard: OnResult
    is_repeatable: bool


class Reports(Protocol):
    """The steps on their way to a router; their number is `len`."""

    def __len__(self) -> int: ...

    def report(self, step: Step) -> None:
        """Report a step, without waiting for the router."""
        ...

    def report_later(self, step: Step, pause_s: float) -> None:
        """Report a step again after a delay, as the router did not know its reservation."""
        ...

    async def finish(self) -> None:
        """Wait until all steps are reported or given up."""
        ...


class ProgressReports:
    """The queued and the delayed steps. A task sends them as long as there are any."""

    __slots__ = ("_later", "_random", "_retries", "_send", "_telling", "_waiting")

    def __init__(self, send: Send, retries: Retries, random: Random) -> None:
        self._send = send
        self._retries = retries
        self._random = random
        self._waiting: list[Step] = []
        self._later: set[asyncio.TimerHandle] = set()
        self._telling: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def report(self, step: Step) -> None:
        """Queue a step."""
        self._waiting.append(step)
        if self._telling is None:
            self._telling = asyncio.create_task(self._send_all())

    def report_later(self, step: Step, pause_s: float) -> None:
        """Queue a step after a delay."""

        def report() -> None:
            self._later.discard(timer)
            self.report(step)

        timer = asyncio.get_running_loop().call_later(pause_s, report)
        self._later.add(timer)

    async def finish(self) -> None:
        """Wait until all steps are sent or given up; gives up those delayed beyond FINISH_S."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + FINISH_S
        while self._telling is not None or self._is_any_due(until_s):
            if self._telling is None:
                await asyncio.sleep(EVERY_S)
            else:
                await asyncio.wait((self._telling,))
        for timer in self._later:
            timer.cancel()

    def _is_any_due(self, until_s: float) -> bool:
        return any(timer.when() <= until_s for timer in self._later)

    async def _send_all(self) -> None:
        try:
            while self._waiting:
                await asyncio.sleep(EVERY_S)
                batch = self._waiting[:MAX_STEPS]
                del self._waiting[:MAX_STEPS]
                await self._send_batch(batch)
        finally:
            self._telling = None

    async def _send_batch(self, batch: list[Step]) -> None:
        attempt = 1
        while batch:
            try:
                results = await self._send([step.step for step in batch])
            except KvRouterError as error:
                batch = self._left(batch, error, attempt)
            else:
                for step, result in zip(batch, results, strict=True):
                    step.heard(_refusal(result))
                return
            pause_s = self._retries.pause_s(attempt, None, self._random)
            await asyncio.sleep(pause_s or 0.0)
            attempt += 1

    def _left(self, batch: list[Step], error: KvRouterError, attempt: int) -> list[Step]:
        """Return the steps to send again; report the error of the others."""
        is_lost = isinstance(error, UnansweredError) and attempt < self._retries.attempts
        left = [step for step in batch if is_lost and step.is_repeatable]
        for step in batch:
            if not (is_lost and step.is_repeatable):
                step.heard(error)
        return left


def _refusal(result: ItemResult) -> KvRouterError | None:
    return None if result.refused is None else rebuilt(result.refused, result.status, None)
