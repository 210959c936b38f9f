"""A router as one would write it in an afternoon: sets of names, live events, nothing else."""

import asyncio
from itertools import takewhile

import msgspec
import zmq
import zmq.asyncio

from router.tools.conformance.steps import BLOCK_SIZE, Marks
from router.tools.conformance.systems.base import Answer, Remark


class NaiveRouter:
    title = "naive"
    answers_best_only = False
    marks = Marks()
    skips = frozenset()

    def __init__(self, directory):
        self._context = zmq.asyncio.Context()
        self._tasks = []
        self._held = {}
        self.seats = ()

    async def start(self, seats):
        self.seats = seats
        self._held = {seat.worker_id: {} for seat in seats}
        self._tasks = [asyncio.create_task(self._follow(seat)) for seat in seats]

    async def ask(self, seats, prompt):
        blocks = {}
        for seat in seats:
            held = set(self._held[seat.worker_id].values())
            prefixes = range(BLOCK_SIZE, len(prompt.token_ids) + 1, BLOCK_SIZE)
            found = takewhile(lambda end: prompt.token_ids[:end] in held, prefixes)  # noqa: B023
            blocks[seat.worker_id] = len(list(found))
        return Answer(blocks)

    def remarks(self):
        return []

    async def engine_restarted(self, seat):
        pass

    async def restart(self):
        await self.leave()
        await self.start(self.seats)

    async def leave(self):
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def stop(self):
        await self.leave()
        self._context.destroy(linger=0)

    async def _follow(self, seat):
        held = self._held[seat.worker_id]
        with self._context.socket(zmq.SUB) as socket:
            socket.set(zmq.LINGER, 0)
            socket.subscribe(b"")
            socket.connect(seat.events_endpoint)
            while True:
                _, _, payload = await socket.recv_multipart()
                for event in msgspec.msgpack.decode(payload)[1]:
                    self._apply(held, event)

    def _apply(self, held, event):
        match event:
            case {"type": "BlockStored", "block_hashes": names, "token_ids": token_ids}:
                before = held.get(event["parent_block_hash"], ())
                for i, name in enumerate(names):
                    held[name] = before + tuple(token_ids[: (i + 1) * BLOCK_SIZE])
            case {"type": "BlockRemoved", "block_hashes": names}:
                for name in names:
                    held.pop(name, None)


class DoubtingRouter(NaiveRouter):
    """The same, and never sure."""

    async def ask(self, seats, prompt):
        blocks = (await super().ask(seats, prompt)).blocks
        return Answer(blocks, dict.fromkeys(blocks, "unsure"))


class BestOnlyRouter(NaiveRouter):
    """The same, but the answer names the chosen worker only."""

    answers_best_only = True

    async def ask(self, seats, prompt):
        blocks = (await super().ask(seats, prompt)).blocks
        best = max(blocks, key=blocks.get)
        return Answer({best: blocks[best]})


class WarningRouter(NaiveRouter):
    """The same, with a log that warns of every removal: once by name, then without."""

    def __init__(self, directory):
        super().__init__(directory)
        self._remarks = []

    def remarks(self):
        self._remarks, remarks = [], self._remarks
        return remarks

    def _apply(self, held, event):
        super()._apply(held, event)
        if event["type"] == "BlockRemoved":
            self._remarks.append(Remark("a block was removed"))


class MarkedRouter(NaiveRouter):
    """The same, with a front end that marks salts; it reads the mark alone."""

    marks = Marks(salt_prefix="mark:", image_digits=16)

    def _apply(self, held, event):
        keys = (event.get("extra_keys") or [None])[0] or [""]
        if not str(keys[0]).startswith("mark:"):
            super()._apply(held, event)
