"""The same fleet twice: for our core, and for the peer's selection service."""

import asyncio
import resource
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import count
from random import Random
from time import monotonic, perf_counter_ns
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import zmq
from msgspec import Struct
from peer import dynamo
from timing import CallTimes

from router.config.core import make_core
from router.config.router import RouterConfig
from router.core.commands import (
    Apply,
    Free,
    PrefillComplete,
    Reserve,
    Select,
    SetConnected,
    UpsertWorker,
)
from router.protocol.catalogue import WorkerAnnouncement
from router.protocol.requests import ConfigOverride, ReserveRequest, SelectRequest
from router.protocol.values import SCHEME, Identity, Rank, Tier
from router.publisher.journal.journal import EventJournal
from router.runtime.process.settings import configured
from router.sequence.active.prompt import prepare
from router.sequence.hashing.block_hashes import chain, local_block_hashes

Tokens: TypeAlias = npt.NDArray[np.uint32]
Call: TypeAlias = Callable[[list[int]], Awaitable[None]]

BLOCK_SIZE = 16
IDENTITY = Identity(SCHEME, BLOCK_SIZE)
SCOPE = {"model_name": "m", "routing_group": "g"}
VISIBLE_S = 60.0
SEED = 6


class Shape(Struct, frozen=True):
    """How many workers of how many ranks there are, and prompts of which length."""

    workers: int
    ranks: int
    prompt_tokens: int


class Hashed(Struct, frozen=True):
    """A prompt as its caller hashed it: signed integers, the form that both sides take."""

    block_hashes: list[int]
    sequence_hashes: list[int]
    isl_tokens: int


class Answer(NamedTuple):
    """What is read out of a reply: the chosen rank, and how many tokens it is credited with."""

    rank: Rank
    cached_tokens: int


class World:
    """What both fleets hold: of one prompt, each rank another part of the beginning; and what is
    booked there: on each rank two prompts of 2,048 tokens.
    """

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self._random = np.random.default_rng(SEED)
        self.prompt = self.new_tokens(shape.prompt_tokens)
        self.ranks = [Rank(w, r) for w in range(shape.workers) for r in range(shape.ranks)]
        blocks = shape.prompt_tokens // BLOCK_SIZE
        held = self._random.integers(0, blocks * 3 // 4, len(self.ranks))
        self.held_blocks = dict(zip(self.ranks, held.tolist(), strict=True))
        self.booked = [self.new_tokens(2_048) for _ in range(2)]

    def new_tokens(self, tokens: int) -> Tokens:
        return self._random.integers(0, 100_000, tokens, dtype=np.uint32)

    def new_prompt(self) -> Tokens:
        """The prompt up to its last quarter, which is new, so that it was not hashed before."""
        tokens = self.shape.prompt_tokens
        kept = tokens * 3 // 4
        return np.concatenate([self.prompt[:kept], self.new_tokens(tokens - kept)])

    def new_prompts(self, count: int) -> list[Tokens]:
        return [self.new_prompt() for _ in range(count)]

    def new_hashed(self, count: int) -> list[Hashed]:
        return [_hashed(prompt) for prompt in self.new_prompts(count)]

    def require_right(self, answers: Iterable[Answer]) -> None:
        """Raise RuntimeError unless each rank is credited with exactly what it holds."""
        for answer in answers:
            if answer.cached_tokens != self.held_blocks[answer.rank] * BLOCK_SIZE:
                raise RuntimeError(f"{answer} is not what that rank holds")


def _hashed(tokens: Tokens) -> Hashed:
    local_hashes = local_block_hashes(tokens, BLOCK_SIZE)
    both = (hashes.view(np.int64).tolist() for hashes in (local_hashes, chain(local_hashes)))
    return Hashed(*both, len(tokens))


class OurFleet:
    """A core, its workers, and what they hold and are booked for."""

    def __init__(self, world: World) -> None:
        config = configured(RouterConfig, reservation_ttl_s=1e9)
        self._core = make_core(config, Random(SEED))
        self._core.handle(SetConnected(True), 0.0)
        self._ids = count()
        for worker_id in range(world.shape.workers):
            self._core.handle(UpsertWorker(_announcement(worker_id, world.shape.ranks)), 0.0)
        for rank, blocks in world.held_blocks.items():
            self._hold(rank, world.prompt[: blocks * BLOCK_SIZE])
            for tokens in world.booked:
                self._book(rank, tokens)

    def _hold(self, rank: Rank, tokens: Tokens) -> None:
        journal = EventJournal(rank, 1, IDENTITY)
        hashes = chain(local_block_hashes(tokens, BLOCK_SIZE))
        journal.stored(Tier.DEVICE, hashes.tolist(), None)
        for message in journal.take():
            self._core.handle(Apply(message), 0.0)

    def _book(self, rank: Rank, tokens: Tokens) -> None:
        request = ReserveRequest(
            **SCOPE,
            token_ids=tokens,
            worker_id=rank.worker_id,
            dp_rank=rank.dp_rank,
            request_id=f"booked-{next(self._ids)}",
        )
        self._core.handle(Reserve(request, prepare(request, [IDENTITY])), 0.0)

    def select(self, tokens: Tokens, policy: str) -> Rank:
        request = SelectRequest(
            **SCOPE, token_ids=tokens, router_config_override=ConfigOverride(policy=policy)
        )
        return self._core.handle(Select(request, prepare(request, [IDENTITY])), 0.0)[0].rank

    def select_hashed(self, prompt: Hashed) -> Answer:
        """Choose by the default policy, from hashes."""
        request = SelectRequest(
            **SCOPE,
            block_hashes=prompt.block_hashes,
            sequence_hashes=prompt.sequence_hashes,
            isl_tokens=prompt.isl_tokens,
        )
        chosen = self._core.handle(Select(request, prepare(request, [IDENTITY])), 0.0)[0]
        return Answer(chosen.rank, chosen.overlap_blocks * BLOCK_SIZE)

    def cycle(self, tokens: Tokens, policy: str) -> None:
        """Choose, book there, mark the prefill complete, free."""
        core, request_id = self._core, f"cycle-{next(self._ids)}"
        request = SelectRequest(
            **SCOPE, token_ids=tokens, router_config_override=ConfigOverride(policy=policy)
        )
        prompt = prepare(request, [IDENTITY])
        rank = core.handle(Select(request, prompt), 0.0)[0].rank
        booking = ReserveRequest(
            **SCOPE,
            token_ids=tokens,
            worker_id=rank.worker_id,
            dp_rank=rank.dp_rank,
            request_id=request_id,
        )
        core.handle(Reserve(booking, prompt), 0.0)
        core.handle(PrefillComplete(request_id), 0.0)
        core.handle(Free(request_id), 0.0)


class PeerFleet:
    """The peer's selection service in this process, fed over sockets, as it has to be."""

    def __init__(self, world: World) -> None:
        self._loop = asyncio.new_event_loop()
        _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, len(world.ranks) + 8)
        self._ids = count()
        self._loop.run_until_complete(self._fill(world))

    def select_times(self, prompts: Sequence[Tokens]) -> CallTimes:
        """Nanoseconds of each choice."""
        return self._loop.run_until_complete(self._times(self._select, prompts))

    def cycle_times(self, prompts: Sequence[Tokens]) -> CallTimes:
        """Nanoseconds of each choice with its booking, the prefill's completion and the end."""
        return self._loop.run_until_complete(self._times(self._cycle, prompts))

    def hashed_times(
        self, prompts: Sequence[Hashed], at_once: int
    ) -> tuple[CallTimes, list[Answer]]:
        """Return nanoseconds of a choice, `at_once` of them awaited together, and the answers."""
        return self._loop.run_until_complete(self._hashed_times(prompts, at_once))

    async def _hashed_times(
        self, prompts: Sequence[Hashed], at_once: int
    ) -> tuple[CallTimes, list[Answer]]:
        times, answers = [], []
        for start in range(0, len(prompts), at_once):
            begun_ns = perf_counter_ns()
            calls = [self._select_hashed(each) for each in prompts[start : start + at_once]]
            answers += await asyncio.gather(*calls) if at_once > 1 else [await calls[0]]
            times.append((perf_counter_ns() - begun_ns) // at_once)
        return times, answers

    async def _select_hashed(self, prompt: Hashed) -> Answer:
        answer = await self._service.select(
            {
                **SCOPE,
                "block_hashes": prompt.block_hashes,
                "sequence_hashes": prompt.sequence_hashes,
                "isl_tokens": prompt.isl_tokens,
            }
        )
        return Answer(Rank(answer["worker_id"], answer["dp_rank"]), answer["overlap"]["gpu"])

    async def _times(self, call: Call, prompts: Sequence[Tokens]) -> CallTimes:
        times = []
        for token_ids in [tokens.tolist() for tokens in prompts]:
            start = perf_counter_ns()
            await call(token_ids)
            times.append(perf_counter_ns() - start)
        return times

    async def _select(self, token_ids: list[int]) -> None:
        await self._service.select({**SCOPE, "token_ids": token_ids})

    async def _cycle(self, token_ids: list[int]) -> None:
        selection_id = f"cycle-{next(self._ids)}"
        asked = {**SCOPE, "token_ids": token_ids, "selection_id": selection_id}
        await self._service.select_and_reserve(asked)
        await self._service.prefill_complete(selection_id)
        await self._service.free_reservation(selection_id)

    async def _fill(self, world: World) -> None:
        self._service = dynamo().SelectionService()  # its threads are its default
        sockets = {rank: self._context.socket(zmq.XPUB) for rank in world.ranks}
        for socket in sockets.values():
            socket.bind("tcp://127.0.0.1:*")
        for worker_id in range(world.shape.workers):
            await self._service.upsert_worker(_registration(worker_id, world.shape.ranks, sockets))
        for rank, socket in sockets.items():
            while not socket.poll(0):  # no subscriber yet
                await asyncio.sleep(0.01)
            blocks = world.held_blocks[rank]
            if blocks:
                socket.send_multipart(_stored(world.prompt[: blocks * BLOCK_SIZE], rank))
        await self._until_visible(world)
        for rank in world.ranks:
            for tokens in world.booked:
                await self._book(rank, tokens)

    async def _until_visible(self, world: World) -> None:
        asked, deadline_s = {**SCOPE, "token_ids": world.prompt.tolist()}, monotonic() + VISIBLE_S
        while monotonic() < deadline_s:
            answer = await self._service.overlap_scores(asked)
            seen = {
                Rank(each["worker_id"], each["dp_rank"]): each["device_blocks"]
                for each in answer["workers"]
            }
            if seen == world.held_blocks:
                return
            await asyncio.sleep(0.05)
        raise TimeoutError("the peer does not hold what was published")

    async def _book(self, rank: Rank, tokens: Tokens) -> None:
        booked = {"token_ids": tokens.tolist(), "selection_id": f"booked-{next(self._ids)}"}
        pinned = {"worker_id": rank.worker_id, "dp_rank": rank.dp_rank}
        await self._service.select_and_reserve({**SCOPE, **booked, "pinned_worker": pinned})


def _announcement(worker_id: int, ranks: int) -> WorkerAnnouncement:
    return WorkerAnnouncement(
        **SCOPE,
        worker_id=worker_id,
        name=f"w{worker_id}",
        endpoint=f"http://w{worker_id}",
        identity=IDENTITY,
        total_kv_blocks=16_384,
        max_num_batched_tokens=8_192,
        data_parallel_size=ranks,
        incarnation=1,
        agent_is_engine=False,
    )


def _registration(worker_id: int, ranks: int, sockets: dict[Rank, zmq.Socket]) -> dict[str, object]:
    endpoints = {
        rank: sockets[Rank(worker_id, rank)].get_string(zmq.LAST_ENDPOINT).rstrip("\0")
        for rank in range(ranks)
    }
    return {
        **SCOPE,
        "worker_id": worker_id,
        "endpoint": f"http://w{worker_id}",
        "block_size": BLOCK_SIZE,
        "max_num_batched_tokens": 8_192,
        "total_kv_blocks": 16_384,
        "data_parallel_start_rank": 0,
        "data_parallel_size": ranks,
        "kv_events_endpoints": endpoints,
    }


def _stored(tokens: Tokens, rank: Rank) -> list[bytes]:
    """A batch of vLLM's: one event with these blocks.

    Engines name equal blocks alike, as vLLM's do with one PYTHONHASHSEED. Where their names
    differ, the peer credits ranks with too few blocks, if its index has more than one thread.
    """
    blocks = len(tokens) // BLOCK_SIZE
    names = list(range(1, blocks + 1))
    event = ["BlockStored", names, None, tokens.tolist(), BLOCK_SIZE, None, "GPU"]
    return [b"", (0).to_bytes(8, "big"), msgspec.msgpack.encode([0.0, [event], rank.dp_rank])]
