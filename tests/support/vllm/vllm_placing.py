"""Requests placed by a router and served by vLLM; what was predicted beside what was reused."""

import asyncio
import itertools
import time
from collections import Counter
from contextlib import suppress

import httpx
from msgspec import Struct

from support.processes.servers import eventually
from support.vllm.vllm_engines import BLOCK_SIZE, MODEL_NAME

UP_S = 180.0
"""A router is up within this, should its kernels have to be compiled first."""

KNOWN_S = 60.0
"""What happened to an engine is known within this; mostly it takes a second."""

SETTLE_S = 5.0
MARGIN_S = 0.1
"""The latest time at which an engine publishes a step's events after its answer."""


class Outcome(Struct, frozen=True):
    """One prediction, and what the engine did."""

    router: str
    worker_id: int
    trust: str
    reason: str | None
    predicted_tokens: int
    cached_tokens: int

    @property
    def is_exact(self):
        return self.trust == "exact"

    @property
    def is_right(self):
        return self.predicted_tokens == self.cached_tokens


class AskedRouter:
    """One router, by its HTTP interface."""

    def __init__(self, name, url):
        self.name = name
        self.url = url

    async def call(self, method, path, **body):
        async with httpx.AsyncClient(base_url=self.url, timeout=15) as client:
            answer = await client.request(method, path, json=body or None)
        assert answer.is_success, f"{method} {path}: {answer.text}"
        return answer.json() if answer.content else None

    async def trusts(self):
        """{worker id: (trust, how many blocks are held)}; of those that can be chosen."""
        views = await self.call("GET", "/workers")
        choosable = [view for view in views if not view["not_schedulable_reasons"]]
        ranks = {view["worker_id"]: view["ranks"][0] for view in choosable}
        return {id_: (rank["trust"], rank["held_blocks"]) for id_, rank in ranks.items()}

    async def held(self):
        """{worker id: sequence hashes}, as the index shows them."""
        held = {}
        for scope in (await self.call("GET", "/dump")).values():
            for event in scope["events"]:
                blocks = event["event"]["data"]["stored"]["blocks"]
                held[event["worker_id"]] = {block["block_hash"] for block in blocks}
        return held

    async def until_up(self):
        await eventually(self._is_up, UP_S)

    async def until_exact(self, worker_ids):
        await eventually(lambda: self._is_exact(worker_ids), KNOWN_S)

    async def until_exactly(self, worker_id, held_blocks):
        await eventually(lambda: self._is_exactly(worker_id, held_blocks), KNOWN_S)

    async def until_doubted(self, worker_id):
        async def is_doubted():
            return not await self._is_exact([worker_id])

        await eventually(is_doubted, KNOWN_S)

    async def _is_up(self):
        try:
            return await self.call("GET", "/health")
        except httpx.HTTPError:
            return False

    async def _is_exact(self, worker_ids):
        trusts = await self.trusts()
        return set(worker_ids) <= set(trusts) and all(
            trusts[worker_id][0]["state"] == "exact" for worker_id in worker_ids
        )

    async def _is_exactly(self, worker_id, held_blocks):
        trusts = await self.trusts()
        if worker_id not in trusts:
            return False
        trust, held = trusts[worker_id]
        return trust["state"] == "exact" and held == held_blocks


class Bench:
    """Routers that follow the same engines: the first one places, the others are asked too.

    `xargs` go to vLLM with every prompt.
    """

    def __init__(self, routers, engines, **xargs):
        self.routers = routers
        self.engines = engines
        self.outcomes = []
        self._xargs = xargs
        self._ids = itertools.count()
        self._answered_s = time.monotonic()

    async def place(self, ask, among=None):
        """Have one prompt placed on one of these workers and served there. Returns the answer.

        What is sent several times at once is compared with the copy that found least: the one
        that was let in first, when the cache was still the one that the router knew.
        """
        among = sorted(among or self.engines)
        await self._settle(among)
        predictions = await self._predict(ask, among)
        engine = self.engines[predictions[0]["worker_id"]]
        assert predictions[0]["endpoint"] == engine.url
        answers = await asyncio.gather(*(self._send(engine, ask) for _ in range(ask.copies)))
        await self._free(predictions[0])
        cached_tokens = min(answer.cached_tokens for answer in answers)
        for router, decision in zip(self.routers, predictions, strict=True):
            self.outcomes.append(_outcome(router.name, decision, cached_tokens))
        return answers[0]

    def _send(self, engine, ask):
        if ask.messages is not None:
            return engine.chat(ask.messages, ask.max_tokens, ask.cache_salt)
        return engine.complete(ask.token_ids, ask.max_tokens, ask.cache_salt, **self._xargs)

    async def settle(self):
        """The same, of what others have asked."""
        self._answered_s = time.monotonic()
        await self._settle(sorted(self.engines))

    async def _settle(self, among):
        """Wait until every router knows of all that these engines did, or for `SETTLE_S`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_S):
                for router in self.routers:
                    await eventually(lambda router=router: self._has_settled(router, among))

    async def _has_settled(self, router, among):
        asked_s = time.monotonic()
        trusts = await router.trusts()
        if not set(among) <= set(trusts):
            return False
        return all(
            trust["state"] in ("exact", "degraded")
            and trust["age_s"] is not None
            and asked_s - trust["age_s"] > self._answered_s + MARGIN_S
            for trust, _ in (trusts[worker_id] for worker_id in among)
        )

    async def _predict(self, ask, among):
        prompt = {"model_name": MODEL_NAME, "token_ids": ask.token_ids}
        if ask.cache_salt is not None:
            prompt["cache_salt"] = ask.cache_salt
        first, *others = self.routers
        decision = await first.call(
            "POST", "/select_and_reserve",
            request_id=f"r{next(self._ids)}", allowed_worker_ids=among, **prompt,
        )  # fmt: skip
        chosen = [decision["worker_id"]]
        return [decision] + [
            await router.call("POST", "/select", allowed_worker_ids=chosen, **prompt)
            for router in others
        ]

    async def _free(self, decision):
        self._answered_s = time.monotonic()
        await self.routers[0].call("DELETE", f"/reservations/{decision['request_id']}")

    def of(self, router):
        return [each for each in self.outcomes if each.router == router.name]

    @property
    def wrong(self):
        """Answers that were called exact, and were not."""
        return [each for each in self.outcomes if each.is_exact and not each.is_right]

    def summary(self):
        lines = []
        for router in self.routers:
            outcomes = self.of(router)
            exact = [each for each in outcomes if each.is_exact]
            hits = sum(each.cached_tokens > 0 for each in exact)
            lines.append(
                f"{router.name}: {len(outcomes)} placed, {len(exact)} answered exact "
                f"({hits} with cached tokens), {sum(each.is_right for each in exact)} of them equal"
            )
            others = Counter((o.trust, o.reason) for o in outcomes if not o.is_exact)
            lines += [f"  {count} {state}: {reason}" for (state, reason), count in others.items()]
        return lines


def _outcome(router, decision, cached_tokens):
    trust = decision["trust"]
    return Outcome(
        router=router,
        worker_id=decision["worker_id"],
        trust=trust["state"],
        reason=trust.get("reason"),
        predicted_tokens=decision["predicted_cached_blocks"] * BLOCK_SIZE,
        cached_tokens=cached_tokens,
    )
