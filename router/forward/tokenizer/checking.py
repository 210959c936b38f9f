"""Asks every engine for the tokens of probes, and compares them with what the tokenizer says."""

import asyncio
import logging
import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, get_args

from router.errors import InvalidFieldError, WireError
from router.forward.asking_tokens import NoTokensError, TokensOfEngines, question
from router.forward.roster import Roster, Worker
from router.forward.tokenizer.chats import KINDS, Kind
from router.forward.tokenizer.checks import Checks, Found, Verdict
from router.forward.tokenizer.errors import NotLocalError, PromptRefusedError
from router.forward.tokenizer.probes import Probe, difference, probes
from router.forward.tokenizer.tokenizers import Tokenizers
from router.http_client import HttpPool, Origin, Request, UpstreamError
from router.publisher.engine_metrics import EngineMetrics
from router.publisher.metrics_dialects import EngineKind

if TYPE_CHECKING:
    from router.forward.tokenizer.local import LocalTokenizer

log = logging.getLogger(__name__)

EVERY_S = 1.0
CHECK_AGAIN_S = 600.0
ASK_AGAIN_S = 5.0
"""After no answer."""

MOST_AT_ONCE = 4
_METRICS = Request("GET", "/metrics", is_repeatable=True)
_METRICS_LIMIT_BYTES = 16 * 1024 * 1024
_PATIENCE_S = 5.0
_NOT_FOR_US = frozenset((401, 403, 404, 405, 501))
"""No such route, or not without a token that only clients have."""


class Checking:
    """Checks who is there, and whoever comes."""

    def __init__(
        self,
        tokenizers: Tokenizers,
        roster: Roster,
        pool: HttpPool,
        engines: TokensOfEngines,
        checks: Checks,
    ) -> None:
        self._tokenizers = tokenizers
        self._roster = roster
        self._pool = pool
        self._engines = engines
        self._checks = checks
        self._due_s: dict[Worker, float] = {}
        self._places = asyncio.Semaphore(MOST_AT_ONCE)

    async def run(self) -> None:
        """Until cancelled. One that hangs keeps none of the others waiting."""
        async with asyncio.TaskGroup() as group:
            while True:
                for worker in self._due(time.monotonic()):
                    tokenizer = self._tokenizers.of(worker.model)
                    if tokenizer is not None:
                        self._due_s[worker] = math.inf
                        group.create_task(self._check(worker, tokenizer))
                await asyncio.sleep(EVERY_S)

    def _due(self, now_s: float) -> list[Worker]:
        """Those who are gone are forgotten."""
        workers = self._roster.workers
        self._checks.keep(workers)
        self._due_s = {each: self._due_s.get(each, now_s) for each in workers.values()}
        return [worker for worker, due_s in self._due_s.items() if due_s <= now_s]

    async def _check(self, worker: Worker, tokenizer: "LocalTokenizer") -> None:
        again_s = ASK_AGAIN_S
        async with self._places:
            try:
                found = await self._found(worker, tokenizer)
            except (UpstreamError, InvalidFieldError) as error:
                log.debug("tokenizer: worker %d: %s", worker.worker_id, error)
            else:
                again_s = CHECK_AGAIN_S
                if self._checks.note(worker.worker_id, found):
                    _tell(worker, found)
        self._due_s[worker] = time.monotonic() + again_s

    async def _found(self, worker: Worker, tokenizer: "LocalTokenizer") -> Found:
        """Raises UpstreamError, InvalidFieldError."""
        verdicts = await self._verdicts(worker, tokenizer)
        return Found(worker.model, verdicts, await self._block_sizes(worker))

    async def _verdicts(
        self, worker: Worker, tokenizer: "LocalTokenizer"
    ) -> Mapping[Kind, Verdict]:
        """Raises UpstreamError, InvalidFieldError."""
        several: dict[Kind, list[str | None]] = {kind: [] for kind in KINDS}
        made: set[Kind] = set()
        try:
            for probe in probes(worker.model, tokenizer.added_texts()):
                ours = await asyncio.to_thread(_ours, tokenizer, probe)
                theirs = await self._theirs(worker, probe)
                several[probe.kind].append(difference(ours, theirs))
                made |= {probe.kind} if theirs is not None else set()
        except NoTokensError as error:
            return dict.fromkeys(KINDS, Verdict("untold", str(error)))
        return {kind: _verdict(whys, kind in made) for kind, whys in several.items()}

    async def _theirs(self, worker: Worker, probe: Probe) -> list[int] | None:
        """None where the engine refuses. Raises NoTokensError for an engine that says no tokens to
        us, UpstreamError, InvalidFieldError.
        """
        try:
            return await self._engines.ask(worker.endpoint, question(probe.asked))
        except NoTokensError as error:
            if error.status in _NOT_FOR_US:
                raise
            if error.status in (400, 422):
                return None
            raise UpstreamError(error.server, "refused", f"/tokenize: {error.status}") from error

    async def _block_sizes(self, worker: Worker) -> tuple[int, int] | None:
        """What its metrics say, if that is something else."""
        try:
            origin = Origin.of(worker.endpoint)
            async with self._pool.asked(origin, _METRICS, _PATIENCE_S) as answer:
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


def _verdict(whys: list[str | None], is_made: bool) -> Verdict:
    """Where all refuse all, nothing is known."""
    differing = [why for why in whys if why is not None]
    if differing:
        return Verdict("differs", differing[0])
    return (
        Verdict("agrees") if is_made else Verdict("differs", "the engine refuses every such chat")
    )


def _tell(worker: Worker, found: Found) -> None:
    for kind, verdict in found.verdicts.items():
        if verdict.outcome == "differs":
            log.warning(
                "tokenizer: worker %d of %r differs in %s: %s; its engine is asked instead",
                worker.worker_id, worker.model, kind, verdict.why,
            )  # fmt: skip
    if found.block_sizes is not None:
        log.warning(
            "worker %d: routers expect blocks of %d tokens, its engine has blocks of %d: nothing "
            "that it caches will be found",
            worker.worker_id, *found.block_sizes,
        )  # fmt: skip
    outcomes = {verdict.outcome for verdict in found.verdicts.values()}
    if outcomes == {"agrees"}:
        log.info("tokenizer: worker %d of %r agrees", worker.worker_id, worker.model)
    if outcomes == {"untold"}:
        log.warning(
            "tokenizer: worker %d of %r does not say its tokens (%s); ours are taken unverified",
            worker.worker_id, worker.model, found.verdicts["text"].why,
        )  # fmt: skip
