"""The proof that a socket is a rank's: one small request to the rank, and the event it causes.

    completion of two blocks and a token ─▶ rank ─▶ its event ─▶ follower ─▶ index ─▶ which ranks
                                                                                      hold it?

The prompt is random and has a salt of its own, so only this request can have stored its blocks. It
costs the engine two blocks of cache and a prefill of two blocks, once in each life.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from random import Random
from typing import Any

from msgspec import Struct, structs

from router.core.core import RouterCore
from router.core.views.workers import EngineOf
from router.discovery.attach import sentences
from router.discovery.attach.engine_client import EngineClient
from router.errors import ServerError
from router.protocol.requests import PromptRequest
from router.protocol.values import Rank, Scope
from router.protocol.workers import WorkerRegistration
from router.sequence.active.prompt import prepare

CONNECT_S = 2.0
REPLAY_S = 30.0
EVENT_S = 2.0
POLL_S = 0.05

PROMPT_BLOCKS = 2
STEPS = 4
"""Tokens to generate: an engine may publish the blocks of one step only in the next one."""

SAFE_TOKENS = (10, 250)
"""The range of token ids that every vocabulary has."""

RANK_HEADER = "x-data-parallel-rank"


def fresh_tokens(rng: Random, count: int) -> list[int]:
    """Return random tokens, which are new with near certainty from about a dozen on."""
    return [rng.randrange(*SAFE_TOKENS) for _ in range(count)]


def fresh_salt(rng: Random, purpose: str) -> str:
    """Return a salt that was never used."""
    return f"{purpose}-{rng.getrandbits(64):016x}"


def completion(tokens: list[int], model: str, salt: str | None = None) -> dict[str, Any]:
    """Return the body of a small completion."""
    body = {"model": model, "prompt": tokens, "max_tokens": STEPS, "temperature": 0}
    return body if salt is None else {**body, "cache_salt": salt}


class RankProof(Struct, frozen=True):
    """The result for one rank.

    `problem`: the clause about what is wrong; None: it is proved. `holders`: the ranks, of any
    worker, whose sockets published the request. `is_final`: a request was sent, and none is sent
    again in this life. `is_wrong`: its events are not those of this rank, as far as can be seen.
    `has_salt`: they contain the salt. `fingerprint`: the engine's own of its version and settings.
    `lookup`: the holders now, of a request without an event, which may still come.
    """

    problem: str | None = None
    holders: frozenset[Rank] = frozenset()
    is_final: bool = True
    is_wrong: bool = False
    has_salt: bool = True
    fingerprint: str | None = None
    lookup: Callable[[], frozenset[Rank]] | None = None

    @property
    def is_proved(self) -> bool:
        """True if the socket published the request to this rank."""
        return self.problem is None

    def again(self, rank: Rank) -> "RankProof":
        """Return the result as of now: an event may have come late."""
        if self.lookup is None or rank not in (holders := self.lookup()):
            return self
        return RankProof(holders=holders, fingerprint=self.fingerprint)


class SocketProver:
    """The sender of the requests. `engine_of`: the state of a rank's follower."""

    def __init__(self, core: RouterCore, engine_of: EngineOf, rng: Random) -> None:
        self._core = core
        self._engine_of = engine_of
        self._rng = rng

    async def prove(
        self, client: EngineClient, registration: WorkerRegistration, dp_ranks: Collection[int]
    ) -> Mapping[int, RankProof]:
        """Return the results of these ranks, which have event sockets."""
        sockets = registration.kv_events_endpoints or {}
        found = await asyncio.gather(
            *(self._prove(client, registration, dp_rank, sockets) for dp_rank in dp_ranks)
        )
        return dict(zip(dp_ranks, found, strict=True))

    async def _prove(
        self,
        client: EngineClient,
        registration: WorkerRegistration,
        dp_rank: int,
        sockets: Mapping[int, str],
    ) -> RankProof:
        rank, address = Rank(registration.worker_id, dp_rank), sockets[dp_rank]
        problem = await self._until_connected(rank)
        if problem is not None:
            ports = sentences.ports_of(sockets.values())
            reason = sentences.unconnected(dp_rank, address, problem or None, ports)
            return RankProof(reason, is_final=False)
        salt = fresh_salt(self._rng, "proof")
        block_size = registration.block_size or 1
        tokens = fresh_tokens(self._rng, PROMPT_BLOCKS * block_size + 1)
        headers = {RANK_HEADER: str(dp_rank)} if len(sockets) > 1 else {}
        body = completion(tokens, registration.model_name, salt)
        try:
            reply = await client.send("POST", "/v1/completions", body, headers)
        except ServerError as error:
            return RankProof(sentences.unproved(dp_rank, error.reason))
        salted, plain = (self._lookup(registration, rank, tokens, each) for each in (salt, None))
        proof = await self._until_stored(rank, address, salted, plain)
        given = reply.get("system_fingerprint")
        fingerprint = given[: sentences.SHORT] if isinstance(given, str) else None
        return structs.replace(proof, fingerprint=fingerprint)

    async def _until_connected(self, rank: Rank) -> str | None:
        """Wait until a rank's events are read. Returns the reason if they are not."""
        began_s = time.monotonic()
        while True:
            view, waited_s = self._engine_of(rank), time.monotonic() - began_s
            condition = "connecting" if view is None else view.condition
            if condition in ("following", "blind"):
                return None
            if waited_s > (CONNECT_S if condition == "connecting" else REPLAY_S):
                return "" if view is None else view.problem or ""
            await asyncio.sleep(POLL_S)

    async def _until_stored(
        self,
        rank: Rank,
        address: str,
        salted: Callable[[], frozenset[Rank]],
        plain: Callable[[], frozenset[Rank]],
    ) -> RankProof:
        """Wait for the event. Engines before vLLM 0.16 publish it without the salt."""
        ends_s = time.monotonic() + EVENT_S
        while True:
            for has_salt, lookup in ((True, salted), (False, plain)):
                if rank in (holders := lookup()):
                    return RankProof(None, holders, has_salt=has_salt)
            if time.monotonic() > ends_s:
                problem = self._silence(rank, address, salted() | plain())
                return RankProof(problem, is_wrong=True, lookup=salted)
            await asyncio.sleep(POLL_S)

    def _silence(self, rank: Rank, address: str, holders: frozenset[Rank]) -> str:
        others = [each.dp_rank for each in holders if each.worker_id == rank.worker_id]
        if others:
            return sentences.swapped(rank.dp_rank, others[0])
        view = self._engine_of(rank)
        if view is not None and view.problem is not None:
            return f"rank {rank.dp_rank}: {view.problem}"
        return sentences.silent(rank.dp_rank, address, EVENT_S)

    def _lookup(
        self, registration: WorkerRegistration, rank: Rank, tokens: list[int], salt: str | None
    ) -> Callable[[], frozenset[Rank]]:
        """Return a function that returns the ranks that hold a prompt."""
        worker = self._core.fleet.get(rank.worker_id)
        scope: Scope = registration.scope
        if worker is None:
            return frozenset
        identity = worker.announcement.identity
        request = PromptRequest(token_ids=tokens, cache_salt=salt)
        prompt = prepare(request, [identity], naming=self._core.naming)
        hashes = prompt.hashed(identity).sequence_hashes
        return lambda: frozenset(
            each for each, _ in self._core.index.find_matches(scope, hashes).items()
        )
