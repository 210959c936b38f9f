"""An adapter of the conformance kit: the router under test, behind seven methods.

    cd examples
    kv-router conformance --adapter conformance_adapter:NaiveRouter --quick

This one is a whole router of a few lines, in the kit's own process: each engine's blocks in a dict,
from live events alone. It shows what a table looks like for a router with known faults, and where
the calls to yours belong. `docs/conformance.md` has the same for a server with an HTTP API.
"""

import asyncio
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from router.tools.conformance.steps import BLOCK_SIZE, Marks, Prompt
from router.tools.conformance.systems.base import Answer, Remark, Seat

Held = dict[Any, tuple[int, ...]]
"""The tokens of a prompt up to and including a block, by the engine's name of the block."""


class NaiveRouter:
    """A router as one would write it in an afternoon: no copies, no gaps, no restarts, no salts."""

    title = "naive"
    answers_best_only = False
    marks = Marks()
    skips: frozenset[str] = frozenset()

    def __init__(self, directory: Path) -> None:  # noqa: ARG002  it writes no log
        self._context = zmq.asyncio.Context()
        self._tasks: list[asyncio.Task[None]] = []
        self._held: dict[int, Held] = {}
        self.seats: Sequence[Seat] = ()

    async def start(self, seats: Sequence[Seat]) -> None:
        """Follow all engines: here yours is started, and told their addresses."""
        self.seats = seats
        self._held = {seat.worker_id: {} for seat in seats}
        self._tasks = [asyncio.create_task(self._follow(seat)) for seat in seats]

    async def ask(self, seats: Sequence[Seat], prompt: Prompt) -> Answer:
        """Return the leading blocks of a prompt that each engine holds: here yours is asked."""
        return Answer({seat.worker_id: self._leading(seat, prompt) for seat in seats})

    def _leading(self, seat: Seat, prompt: Prompt) -> int:
        held = set(self._held[seat.worker_id].values())
        ends = range(BLOCK_SIZE, len(prompt.token_ids) + 1, BLOCK_SIZE)
        return len(list(takewhile(lambda end: prompt.token_ids[:end] in held, ends)))

    def remarks(self) -> list[Remark]:
        """Return the warnings of its log since the last call."""
        return []

    async def engine_restarted(self, seat: Seat) -> None:
        """Do what your fleet does when an engine dies and comes back; most do nothing."""

    async def restart(self) -> None:
        """Kill it and start it again, as an operator would."""
        await self.leave()
        await self.start(self.seats)

    async def stop(self) -> None:
        """Leave nothing behind."""
        await self.leave()
        self._context.destroy(linger=0)

    async def leave(self) -> None:
        """Stop following all engines."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _follow(self, seat: Seat) -> None:
        held = self._held[seat.worker_id]
        with self._context.socket(zmq.SUB) as socket:
            socket.set(zmq.LINGER, 0)
            socket.subscribe(b"")
            socket.connect(seat.events_endpoint)
            while True:
                _, _, payload = await socket.recv_multipart()
                for event in msgspec.msgpack.decode(payload)[1]:
                    self.apply(held, event)

    def apply(self, held: Held, event: Any) -> None:
        """Note an event of an engine."""
        match event:
            case {"type": "BlockStored", "block_hashes": names, "token_ids": token_ids}:
                before = held.get(event["parent_block_hash"], ())
                for i, name in enumerate(names):
                    held[name] = before + tuple(token_ids[: (i + 1) * BLOCK_SIZE])
            case {"type": "BlockRemoved", "block_hashes": names}:
                for name in names:
                    held.pop(name, None)
