"""What comes up: leading blocks of prompts, each from the fastest tier that has it.

load ─▶ worth it? ─▶ batches ─▶ tiers' threads ─▶ came, or lost ─▶ a slower tier
"""

from collections.abc import Sequence
from itertools import takewhile

import torch
from torch import Tensor

from worker_agent.offload.worth import Worth
from worker_agent.tiers.ladder import Ladder
from worker_agent.tiers.level import Giver, Levels
from worker_agent.tiers.loading import Loading
from worker_agent.tiers.worker import Call, Spent
from worker_agent.transfer.outcome import Outcome, leading
from worker_agent.transfer.slots import aligned_rows

_FAILURES = (Outcome.FAILED, Outcome.CORRUPT)

TRIED_EVERY = 64
"""Of so many prompts that are computed sooner than loaded, one is loaded, in part."""


class Ascent:
    """Loads under way. Invariant: each of them has something to come, or calls in flight."""

    __slots__ = ("_loadings", "_refused", "_tiers", "_worth")

    def __init__(self, tiers: Levels, worth: Worth | None) -> None:
        self._tiers = tiers
        self._worth = worth
        self._loadings: list[Loading] = []
        self._refused = 0

    @property
    def is_waited_for(self) -> bool:
        """Whether somebody waits for a block."""
        return any(not loading.is_done for loading in self._loadings)

    def load(
        self,
        identities: Sequence[bytes],
        now_s: float,
        timeout_s: float,
        *,
        is_whole: bool,
        peer: Giver | None = None,
        peer_blocks: int = 0,
    ) -> Loading | None:
        """See TierStack. `peer`: who has the first `peer_blocks` of them, too."""
        ladder = Ladder(self._tiers, identities, peer, peer_blocks)
        blocks = min(self._room_blocks, len(identities))
        count = self._worth_loading(ladder, blocks, timeout_s) or self._tried(ladder, blocks)
        if not count or (is_whole and count < len(identities)):
            return None
        rows = _host_rows(count, self._tiers.settings.block_bytes)
        loading = Loading(identities[:count], rows, now_s + timeout_s, is_whole=is_whole)
        self._loadings.append(loading)
        self._fetch(loading, ladder, 0, count)
        return loading

    def loadable(self, identities: Sequence[bytes], timeout_s: float) -> int:
        """See TierStack."""
        known = takewhile(self._tiers.held.tiers, identities[: self._room_blocks])
        ladder = Ladder(self._tiers, identities)
        return self._worth_loading(ladder, sum(1 for _ in known), timeout_s)

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """How fast prompts are computed; None before it was measured, or where nobody asks."""
        return None if self._worth is None else self._worth.prefill_tokens_per_s

    def note_prefill(self, tokens: int, busy_s: float) -> None:
        """So many prompt tokens were computed."""
        if self._worth is not None:
            self._worth.note_prefill(tokens, busy_s)

    def end_late(self, now_s: float) -> None:
        """Whatever has not come in time will not come."""
        for loading in self._loadings:
            if now_s >= loading.deadline_s and not loading.is_done:
                loading.late()
        self._loadings = [each for each in self._loadings if each.in_flight or not each.is_done]

    def wait_s(self, now_s: float) -> float | None:
        """In how long the next one is late; None if nobody waits."""
        waits = [each.deadline_s - now_s for each in self._loadings if not each.is_done]
        return max(min(waits), 0.0) if waits else None

    def cancel(self) -> None:
        """Nobody waits for anything any more."""
        for loading in self._loadings:
            loading.cancel()

    def check_invariants(self) -> None:
        """Assert the invariant in the class's docstring, after `end_late`."""
        assert all(each.in_flight or not each.is_done for each in self._loadings)

    def _worth_loading(self, ladder: Ladder, blocks: int, timeout_s: float) -> int:
        count = 0
        for rung, run in ladder.runs(0, blocks):
            speed, worth = ladder.givers[rung].speed, self._worth
            wanted = len(run) if worth is None else worth.blocks_to_load(speed, len(run), timeout_s)
            count += wanted
            if wanted < len(run):
                break
        return count

    def _tried(self, ladder: Ladder, blocks: int) -> int:
        """A batch of what is not worth it, now and then: who was slow is measured again."""
        run = next(ladder.runs(0, blocks), None)
        if run is None:
            return 0
        self._refused += 1
        return 0 if self._refused % TRIED_EVERY else min(len(run[1]), self._batch_blocks)

    @property
    def _room_blocks(self) -> int:
        """So many more may be on their way."""
        loading_blocks = sum(len(loading.identities) for loading in self._loadings)
        return max(self._tiers.settings.max_loading_blocks - loading_blocks, 0)

    @property
    def _batch_blocks(self) -> int:
        return self._tiers.settings.batch_blocks

    def _fetch(
        self, loading: Loading, ladder: Ladder, start: int, stop: int, below: int = -1
    ) -> None:
        """Ask for blocks of `loading`, each from the highest rung below one that may have it."""
        reached = start
        for rung, run in ladder.runs(start, stop, below):
            for first in range(run.start, run.stop, self._batch_blocks):
                last = min(first + self._batch_blocks, run.stop)
                if not self._fetch_batch(loading, ladder, range(first, last), rung):
                    loading.lost(first)
                    return
            reached = run.stop
        if reached < stop:
            loading.lost(reached)

    def _fetch_batch(self, loading: Loading, ladder: Ladder, places: range, rung: int) -> bool:
        giver, (start, stop) = ladder.givers[rung], (places.start, places.stop)
        identities, rows = loading.identities[start:stop], loading.rows[start:stop]
        size_bytes = rows.numel()
        is_first = not giver.speed.queued_bytes

        def run() -> Sequence[Outcome]:
            if not loading.wants(start):
                return []
            return giver.store.load(identities, rows, is_sampled=giver.is_sampled)

        def then(outcomes: Sequence[Outcome] | None, spent: Spent) -> None:
            giver.speed.queued_bytes -= size_bytes
            loading.in_flight -= 1
            came = leading(outcomes or [])
            giver.up.count(came, rows.shape[1], spent.busy_s)
            if came:
                giver.speed.note(came, spent.waited_s if is_first else 0.0, spent.busy_s)
            loading.came(start, came)
            if start + came < stop and loading.wants(start + came):
                giver.up.failed += not outcomes or outcomes[came] in _FAILURES
                self._fetch(loading, ladder, start + came, stop, below=rung)

        if not giver.worker.submit(Call(run, then), is_load=True):
            return False
        giver.speed.queued_bytes += size_bytes
        loading.in_flight += 1
        return True


def _host_rows(count: int, block_bytes: int) -> Tensor:
    """Rows that the next hop takes as they are: a device, if there is one, or a disk."""
    if torch.cuda.is_available():
        with torch.inference_mode(mode=False):  # see aligned_rows
            return torch.empty((count, block_bytes), dtype=torch.uint8, pin_memory=True)
    return aligned_rows(count, block_bytes)
