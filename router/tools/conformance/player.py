"""Plays scenarios to systems, all of them at the same time, over real sockets."""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from itertools import groupby
from pathlib import Path

import msgspec
import zmq.asyncio
from msgspec import Struct

from router.tools.conformance.score import Cell, Question
from router.tools.conformance.stage import Stage
from router.tools.conformance.steps import (
    Ask,
    Marks,
    Prompt,
    Restart,
    RestartRouter,
    Scenario,
    Step,
)
from router.tools.conformance.systems.base import System

FIRST_PAUSE_S = 0.25
"""Before a wrong answer is asked for again; then twice as long each time."""


class Patience(Struct, frozen=True):
    """The time that systems have to process what engines published.

    A system is asked `settle_s` after the last action, and again until it is right and certain, or
    `limit_s` are over. After its actions a scenario has the stage to itself for `log_s`, so that
    warnings in a log that name no engine can be attributed to it.
    """

    settle_s: float = 1.0
    limit_s: float = 5.0
    log_s: float = 0.1


class Fleet:
    """Systems with all engines of some scenarios."""

    def __init__(
        self, scenarios: Sequence[Scenario], systems: Mapping[str, System], patience: Patience
    ) -> None:
        self._scenarios = scenarios
        self._systems = dict(systems)
        self._patience = patience
        self._ready = asyncio.Barrier(len(scenarios))
        self._turn = asyncio.Lock()
        self._remarks: dict[tuple[str, int], list[str]] = defaultdict(list)
        """By system and worker id."""
        self.unavailable: dict[str, str] = {}
        """Systems that did not start, with the reason."""

    async def play(self) -> list[dict[str, Cell]]:
        """Return cells by scenario, and by name of the system."""
        forms = list({system.marks: None for system in self._systems.values()})
        async with AsyncExitStack() as stack:
            context = stack.enter_context(zmq.asyncio.Context())
            stages = [Stage(context, i, each, forms) for i, each in enumerate(self._scenarios)]
            for stage in stages:
                stack.push_async_callback(stage.close)
            for system in self._systems.values():
                stack.push_async_callback(system.stop)
            await asyncio.gather(*[self._start(name, stages) for name in list(self._systems)])
            cells = await asyncio.gather(*[self._play(stage) for stage in stages])
            self._read_logs(())
            return [self._with_remarks(*pair) for pair in zip(stages, cells, strict=True)]

    async def _start(self, name: str, stages: Sequence[Stage]) -> None:
        system = self._systems[name]
        try:
            await system.start([seat for stage in stages for seat in stage.seats(system.marks)])
        except Exception as error:  # noqa: BLE001  a system may fail in ways of its own
            self.unavailable[name] = str(error) or repr(error)
            await self._systems.pop(name).stop()

    async def _play(self, stage: Stage) -> dict[str, Cell]:
        cells = {name: Cell() for name in self._systems}
        await stage.until_subscribed(self._subscribers())
        for kind, steps in groupby(stage.scenario.steps, type):
            if kind is Ask:
                cells = await self._asked(stage, [s for s in steps if isinstance(s, Ask)], cells)
            elif kind is RestartRouter:
                await self._restarted()
                await stage.until_subscribed(self._subscribers())
            else:
                await self._act(stage, list(steps))
        return cells

    def _subscribers(self) -> Counter[Marks]:
        return Counter(system.marks for system in self._systems.values())

    async def _act(self, stage: Stage, steps: Sequence[Step]) -> None:
        """Let the engines of one scenario act, and attribute the warnings that follow to it."""
        async with self._turn:
            for step in steps:
                await stage.act(step)
                if isinstance(step, Restart):
                    await self._engine_restarted(stage, step.engine)
            await asyncio.sleep(self._patience.log_s)
            self._read_logs(stage.worker_ids)

    async def _engine_restarted(self, stage: Stage, engine: int) -> None:
        systems = self._systems.values()
        await asyncio.gather(*[s.engine_restarted(stage.seats(s.marks)[engine]) for s in systems])
        await stage.until_subscribed(self._subscribers())

    def _read_logs(self, worker_ids: Sequence[int]) -> None:
        """Attribute new warnings to the worker that they name, or else to `worker_ids`."""
        for name, system in self._systems.items():
            for remark in system.remarks():
                for worker in worker_ids if remark.worker_id is None else (remark.worker_id,):
                    self._remarks[name, worker].append(remark.text)

    def _with_remarks(self, stage: Stage, cells: Mapping[str, Cell]) -> dict[str, Cell]:
        """Return the cells that count, with the warnings of the logs."""
        names = {stage.scenario.root_cause, stage.scenario.name}
        return {
            name: msgspec.structs.replace(
                cell, remarks=tuple(r for w in stage.worker_ids for r in self._remarks[name, w])
            )
            for name, cell in cells.items()
            if names.isdisjoint(self._systems[name].skips)
        }

    async def _restarted(self) -> None:
        """Restart the systems once for all scenarios, when each of them is at that step."""
        if await self._ready.wait() == 0:
            self._read_logs(())
            restarts = [system.restart() for system in self._systems.values()]
            await asyncio.gather(*restarts, return_exceptions=True)  # silence is an answer, too
        await self._ready.wait()

    async def _asked(
        self, stage: Stage, asks: Sequence[Ask], cells: Mapping[str, Cell]
    ) -> dict[str, Cell]:
        """Ask all questions of one point of a scenario at the same time."""
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
    """Return cells by scenario and system, and systems that are not available with the reason.

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
