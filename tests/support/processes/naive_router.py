"""Variants of the example adapter: what the kit has to see of a system."""

from conformance_adapter import NaiveRouter

from router.tools.conformance.steps import Marks
from router.tools.conformance.systems.base import Answer, Remark


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

    def apply(self, held, event):
        super().apply(held, event)
        if event["type"] == "BlockRemoved":
            self._remarks.append(Remark("a block was removed"))


class MarkedRouter(NaiveRouter):
    """The same, with a front end that marks salts; it reads the mark alone."""

    marks = Marks(salt_prefix="mark:", image_digits=16)

    def apply(self, held, event):
        keys = (event.get("extra_keys") or [None])[0] or [""]
        if not str(keys[0]).startswith("mark:"):
            super().apply(held, event)
