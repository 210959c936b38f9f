"""Asks a TensorRT-LLM server for its cache's events, again and again, for all its ranks at once."""

import logging
import time
from collections.abc import Callable, Sequence

import httpx

from router.errors import WireError
from router.publisher.http_fetch import ask_forever, fetch
from router.publisher.pull_follower import PullFollower
from router.publisher.trtllm_events import TrtllmAnswer, decode_trtllm_events

log = logging.getLogger(__name__)

TIMEOUT_S = 5.0
"""Releases before 1.1 wait 2 s for an event before they answer that there is none."""
LIMIT_BYTES = 32 << 20
MAX_PAUSE_S = 2.0


class TrtllmPull:
    """One server. Nobody else may ask it: each event is told once."""

    def __init__(
        self,
        url: str,
        followers: Sequence[PullFollower],
        interval_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._url = url
        self._followers = followers
        self._interval_s = interval_s
        self._clock = clock
        self._problem: str | None = None

    async def run(self) -> None:
        """Ask until cancelled; after a failure less often."""
        await ask_forever(
            self._ask,
            timeout_s=TIMEOUT_S,
            interval_s=self._interval_s,
            max_pause_s=MAX_PAUSE_S,
        )

    async def _ask(self, client: httpx.AsyncClient) -> bool:
        """One question, and whether it was answered."""
        asked_s = self._clock()
        try:
            body = await fetch(
                client, "POST", self._url, limit_bytes=LIMIT_BYTES, timeout_s=TIMEOUT_S
            )
            answer = decode_trtllm_events(body)
        except WireError as error:
            self._failed(error.reason)
            return False
        self._problem = None
        self._share(answer, asked_s)
        return True

    def _share(self, answer: TrtllmAnswer, asked_s: float) -> None:
        """To each rank its own; what names no rank is the first one's."""
        for place, follower in enumerate(self._followers):
            ours = (follower.rank.dp_rank, None) if place == 0 else (follower.rank.dp_rank,)
            batches = [batch for batch in answer.batches if batch.dp_rank in ours]
            follower.pulled(batches, answer.malformed, asked_s)

    def _failed(self, problem: str) -> None:
        if problem != self._problem:
            log.warning("cannot ask %s for events: %s; trying again", self._url, problem)
        self._problem = problem
        for follower in self._followers:
            follower.failed(f"cannot ask {self._url} for events: {problem}")
