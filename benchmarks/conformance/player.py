"""Plays scenarios to systems, all of them at the same time, over real sockets."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from itertools import groupby
from pathlib import Path

import zmq.asyncio
from msgspec import Struct

from .score import Cell, Question
from .stage import Stage
from .steps import Ask, Prompt, Restart, RestartRouter, Scenario, Step
from .systems.base import Seat, System

FIRST_PAUSE_S = 0.25
"""Before a wrong answer is asked for again; then twice as long each time."""


class Patience(Struct, frozen=True):
    """How long a system may take to take in what engines said.

    It is asked `settle_s` after the last of it, and again until it is right and certain, or
    `limit_s` are over.
    """

    settle_s: float = 1.0
    limit_s: float = 5.0


class Fleet:
    """Systems with all engines of some scenarios."""

    def __init__(
        self, scenarios: Sequence[Scenario], systems: Mapping[str, System], patience: Patience
    ) -> None:
        self._scenarios = scenarios
        self._systems = dict(systems)
        self._patience = patience
        self._ready = asyncio.Barrier(len(scenarios))
        self.unavailable: dict[str, str] = {}
        """Systems that did not start, and why."""

    async def play(self) -> list[dict[str, Cell]]:
        """By scenario, and by name of the system."""
        async with AsyncExitStack() as stack:
            context = stack.enter_context(zmq.asyncio.Context())
            stages = [Stage(context, i, each) for i, each in enumerate(self._scenarios)]
            for stage in stages:
                stack.push_async_callback(stage.close)
            seats = [seat for stage in stages for seat in stage.seats]
            for system in self._systems.values():
                stack.push_async_callback(system.stop)
            await asyncio.gather(*[self._start(name, seats) for name in list(self._systems)])
            return await asyncio.gather(*[self._play(stage) for stage in stages])

    async def _start(self, name: str, seats: Sequence[Seat]) -> None:
        try:
            await self._systems[name].start(seats)
        except Exception as error:  # noqa: BLE001  any system may fail in ways of its own
            self.unavailable[name] = str(error) or repr(error)
            await self._systems.pop(name).stop()

    async def _play(self, stage: Stage) -> dict[str, Cell]:
        cells = {name: Cell() for name in self._systems}
        await stage.until_heard_by(len(self._systems))
        for is_asking, steps in groupby(stage.scenario.steps, lambda step: isinstance(step, Ask)):
            if is_asking:
                cells = await self._asked(stage, list(steps), cells)
            else:
                await self._act(stage, list(steps))
        return cells

    async def _act(self, stage: Stage, steps: Sequence[Step]) -> None:
        for step in steps:
            if isinstance(step, RestartRouter):
                await self._restarted()
            else:
                await stage.act(step)
            if isinstance(step, RestartRouter | Restart):
                await stage.until_heard_by(len(self._systems))

    async def _restarted(self) -> None:
        """Once for all scenarios, when each of them is there."""
        if await self._ready.wait() == 0:
            restarts = [system.restart() for system in self._systems.values()]
            await asyncio.gather(*restarts, return_exceptions=True)  # silence is an answer, too
        await self._ready.wait()

    async def _asked(
        self, stage: Stage, asks: Sequence[Ask], cells: Mapping[str, Cell]
    ) -> dict[str, Cell]:
        """What is asked at the same point of a scenario is asked at the same time."""
        truths = [stage.truth(ask) for ask in asks]
        await stage.settled(self._patience.settle_s)
        deadline = time.monotonic() + self._patience.limit_s

        async def of(name: str) -> Cell:
            questions = [
                self._ask(stage, name, ask.prompt, truth, deadline)
                for ask, truth in zip(asks, truths, strict=True)
            ]
            return cells[name].after(await asyncio.gather(*questions))

        return dict(zip(cells, await asyncio.gather(*map(of, cells)), strict=True))

    async def _ask(
        self, stage: Stage, name: str, prompt: Prompt, truth: tuple[int, ...], deadline: float
    ) -> Question:
        pause_s = FIRST_PAUSE_S
        while True:
            compared = await stage.compared(self._systems[name], prompt, truth)
            if compared.is_certain or time.monotonic() > deadline:
                return Question(prompt, truth, compared)
            await asyncio.sleep(min(pause_s, max(deadline - time.monotonic(), 0)))
            pause_s *= 2


async def play(
    scenarios: Sequence[Scenario],
    kinds: Mapping[str, type[System]],
    directory: Path,
    patience: Patience,
) -> tuple[list[dict[str, Cell]], dict[str, str]]:
    """Cells by scenario and system, and systems that could not be had with the reason.

    Scenarios that kill routers get routers of their own.
    """
    cells: dict[str, dict[str, Cell]] = {}
    unavailable: dict[str, str] = {}

    async def of(chosen: list[Scenario], label: str) -> None:
        systems = {name: kind(_folder(directory, label)) for name, kind in kinds.items()}
        fleet = Fleet(chosen, systems, patience)
        for scenario, row in zip(chosen, await fleet.play(), strict=True):
            cells[scenario.name] = row
        unavailable.update(fleet.unavailable)

    harmless = [scenario for scenario in scenarios if not scenario.restarts_router]
    killing = [scenario for scenario in scenarios if scenario.restarts_router]
    parts = {"harmless": harmless, "killing": killing}
    await asyncio.gather(*[of(chosen, label) for label, chosen in parts.items() if chosen])
    return [cells[scenario.name] for scenario in scenarios], unavailable


def _folder(directory: Path, label: str) -> Path:
    folder = directory / label
    folder.mkdir(exist_ok=True)
    return folder
