"""Verification of tokenizers: compares tokens of probes with those of every engine."""

import asyncio
import logging
import math
import time
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from msgspec import Struct

from router.errors import InvalidFieldError, WireError
from router.forward.resilience.worker_list import ListedWorker, WorkerList
from router.forward.tokenizer.chats import KINDS, Kind
from router.forward.tokenizer.engine_client import EngineClient, NoTokensError
from router.forward.tokenizer.engine_tokens import question
from router.forward.tokenizer.errors import NotLocalError, PromptRefusedError
from router.forward.tokenizer.probes import Probe, difference, probes
from router.forward.tokenizer.tokenizers import Tokenizers
from router.publisher.engine_metrics.dialects import EngineKind
from router.publisher.engine_metrics.metrics import EngineMetrics
from router.runtime.http_client import HttpPool, Origin, Request, UpstreamError

if TYPE_CHECKING:
    from router.forward.tokenizer.local import LocalTokenizer


Outcome: TypeAlias = Literal["agrees", "differs", "untold"]
"""`untold`: the engine has no `/tokenize`, or refuses this process."""

Standing: TypeAlias = Literal["agrees", "differs", "unverified", "unchecked"]
"""The state of a model's tokenizer. `unchecked`: no engine was checked yet.

`unverified`: no engine returns tokens, so only reported usage can show a mismatch.
"""

BELIEVED: frozenset[Standing] = frozenset(("agrees", "unverified"))


class ProbeVerdict(Struct, frozen=True):
    """The result for one engine and one kind of prompt; `why`: the difference or failure."""

    outcome: Outcome
    why: str = ""


class Found(Struct, frozen=True):
    """The result of a worker's check.

    `block_sizes`: the router's block size and the engine's, if they differ.
    """

    model: str
    verdicts: Mapping[Kind, ProbeVerdict]
    block_sizes: tuple[int, int] | None = None


class Checks:
    """The latest check of every current worker."""

    __slots__ = ("_found",)

    def __init__(self) -> None:
        self._found: dict[int, Found] = {}

    def note(self, worker_id: int, found: Found) -> bool:
        """Store a result. Returns whether it has changed."""
        is_news = self._found.get(worker_id) != found
        self._found[worker_id] = found
        return is_news

    def keep(self, worker_ids: Collection[int]) -> None:
        """Delete the results of all other workers."""
        for worker_id in self._found.keys() - set(worker_ids):
            del self._found[worker_id]

    def standing(self, model: str, kind: Kind) -> Standing:
        """Return the state of a model's tokenizer; one differing worker is enough to reject it."""
        outcomes = {
            found.verdicts[kind].outcome
            for found in self._found.values()
            if found.model == model and kind in found.verdicts
        }
        if "differs" in outcomes:
            return "differs"
        if "agrees" in outcomes:
            return "agrees"
        return "unverified" if outcomes else "unchecked"

    def believed(self, model: str) -> frozenset[Kind]:
        """Return the kinds of prompts for which the tokenizer is trusted."""
        return frozenset(kind for kind in KINDS if self.standing(model, kind) in BELIEVED)

    def counts(self) -> Mapping[tuple[str, Kind, Outcome], int]:
        """Return the number of workers by model, kind and outcome."""
        counts: dict[tuple[str, Kind, Outcome], int] = {}
        for found in self._found.values():
            for kind, verdict in found.verdicts.items():
                key = (found.model, kind, verdict.outcome)
                counts[key] = counts.get(key, 0) + 1
        return counts

    def mismatched_block_sizes(self) -> Iterator[tuple[int, int, int]]:
        """Yield worker id, router's and engine's block size of each mismatch."""
        for worker_id, found in sorted(self._found.items()):
            if found.block_sizes is not None:
                yield worker_id, *found.block_sizes

    def problems(self) -> list[str]:
        """Return all differences, one sentence each."""
        named = [
            f"worker {worker_id} of {found.model!r}: {kind}: {verdict.why}"
            for worker_id, found in sorted(self._found.items())
            for kind, verdict in found.verdicts.items()
            if verdict.outcome == "differs"
        ]
        return named + [
            f"worker {worker_id}: blocks of {ours} tokens in the router, of {own} in the engine"
            for worker_id, ours, own in self.mismatched_block_sizes()
        ]


log = logging.getLogger(__name__)

EVERY_S = 1.0
CHECK_AGAIN_S = 600.0
ASK_AGAIN_S = 5.0
"""Delay after a failed check, in seconds."""

MOST_AT_ONCE = 4
_METRICS = Request("GET", "/metrics", is_repeatable=True)
_METRICS_LIMIT_BYTES = 16 * 1024 * 1024
_PATIENCE_S = 5.0
_NOT_FOR_US = frozenset((401, 403, 404, 405, 501))
"""Statuses of a missing route, or of one that requires a client's token."""


class TokenizerVerification:
    """Checks every worker, including new ones."""

    def __init__(
        self,
        tokenizers: Tokenizers,
        roster: WorkerList,
        pool: HttpPool,
        engines: EngineClient,
        checks: Checks,
    ) -> None:
        self._tokenizers = tokenizers
        self._roster = roster
        self._pool = pool
        self._engines = engines
        self._checks = checks
        self._due_s: dict[ListedWorker, float] = {}
        self._places = asyncio.Semaphore(MOST_AT_ONCE)

    async def run(self) -> None:
        """Check workers, until cancelled. A hanging engine delays no other check."""
        async with asyncio.TaskGroup() as group:
            while True:
                for worker in self._due(time.monotonic()):
                    tokenizer = self._tokenizers.of(worker.model)
                    if tokenizer is not None:
                        self._due_s[worker] = math.inf
                        group.create_task(self._check(worker, tokenizer))
                await asyncio.sleep(EVERY_S)

    def _due(self, now_s: float) -> list[ListedWorker]:
        """Return the workers that are due, and drop the state of removed ones."""
        workers = self._roster.workers
        self._checks.keep(workers)
        self._due_s = {each: self._due_s.get(each, now_s) for each in workers.values()}
        return [worker for worker, due_s in self._due_s.items() if due_s <= now_s]

    async def _check(self, worker: ListedWorker, tokenizer: "LocalTokenizer") -> None:
        again_s = ASK_AGAIN_S
        async with self._places:
            try:
                found = await self._found(worker, tokenizer)
            except (UpstreamError, InvalidFieldError) as error:
                log.debug("tokenizer: worker %d: %s", worker.worker_id, error)
            else:
                again_s = CHECK_AGAIN_S
                if self._checks.note(worker.worker_id, found):
                    _log_difference(worker, found)
        self._due_s[worker] = time.monotonic() + again_s

    async def _found(self, worker: ListedWorker, tokenizer: "LocalTokenizer") -> Found:
        """Check one worker. Raises UpstreamError, InvalidFieldError."""
        verdicts = await self._verdicts(worker, tokenizer)
        return Found(worker.model, verdicts, await self._block_sizes(worker))

    async def _verdicts(
        self, worker: ListedWorker, tokenizer: "LocalTokenizer"
    ) -> Mapping[Kind, ProbeVerdict]:
        """Compare all kinds of prompts. Raises UpstreamError, InvalidFieldError."""
        several: dict[Kind, list[str | None]] = {kind: [] for kind in KINDS}
        made: set[Kind] = set()
        try:
            for probe in probes(worker.model, tokenizer.added_texts()):
                ours = await asyncio.to_thread(_ours, tokenizer, probe)
                theirs = await self._theirs(worker, probe)
                several[probe.kind].append(difference(ours, theirs))
                made |= {probe.kind} if theirs is not None else set()
        except NoTokensError as error:
            return dict.fromkeys(KINDS, ProbeVerdict("untold", str(error)))
        return {kind: _verdict(whys, kind in made) for kind, whys in several.items()}

    async def _theirs(self, worker: ListedWorker, probe: Probe) -> list[int] | None:
        """Return an engine's tokens of a probe, or None if it refuses the prompt.

        Raises NoTokensError if the engine does not offer this process tokens, UpstreamError,
        InvalidFieldError.
        """
        try:
            return await self._engines.tokenize(worker.endpoint, question(probe.asked))
        except NoTokensError as error:
            if error.status in _NOT_FOR_US:
                raise
            if error.status in (400, 422):
                return None
            raise UpstreamError(error.server, "refused", f"/tokenize: {error.status}") from error

    async def _block_sizes(self, worker: ListedWorker) -> tuple[int, int] | None:
        """Return the router's and the engine's block sizes if its metrics show a difference."""
        try:
            origin = Origin.of(worker.endpoint)
            async with self._pool.response(origin, _METRICS, _PATIENCE_S) as answer:
                text = (await answer.read(_METRICS_LIMIT_BYTES, _PATIENCE_S)).decode()
            sizes = {EngineMetrics(kind, text).facts().block_size for kind in get_args(EngineKind)}
        except (UpstreamError, WireError, UnicodeDecodeError):
            return None
        own = next((size for size in sizes if size is not None), worker.block_size)
        return None if own == worker.block_size else (worker.block_size, own)


def _ours(tokenizer: "LocalTokenizer", probe: Probe) -> list[int] | None:
    try:
        return tokenizer.tokens(probe.asked)[1]
    except (PromptRefusedError, NotLocalError):
        return None


def _verdict(whys: list[str | None], is_made: bool) -> ProbeVerdict:
    """Return the verdict on one kind; refusals by both sides alone prove no agreement."""
    differing = [why for why in whys if why is not None]
    if differing:
        return ProbeVerdict("differs", differing[0])
    return (
        ProbeVerdict("agrees")
        if is_made
        else ProbeVerdict("differs", "the engine refuses every such chat")
    )


def _log_difference(worker: ListedWorker, found: Found) -> None:
    for kind, verdict in found.verdicts.items():
        if verdict.outcome == "differs":
            log.warning(
                "tokenizer: worker %d of %r differs in %s: %s; its engine tokenizes these prompts",
                worker.worker_id, worker.model, kind, verdict.why,
            )  # fmt: skip
    if found.block_sizes is not None:
        log.warning(
            "worker %d: the router uses blocks of %d tokens, its engine blocks of %d: no cached "
            "block will be found; configure the same block size",
            worker.worker_id, *found.block_sizes,
        )  # fmt: skip
    outcomes = {verdict.outcome for verdict in found.verdicts.values()}
    if outcomes == {"agrees"}:
        log.info("tokenizer: worker %d of %r agrees", worker.worker_id, worker.model)
    if outcomes == {"untold"}:
        log.warning(
            "tokenizer: worker %d of %r does not return tokens (%s); local tokens are not verified",
            worker.worker_id, worker.model, found.verdicts["text"].why,
        )  # fmt: skip
