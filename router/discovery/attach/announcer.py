"""Sentences about attached engines: on a terminal or in the log, on the timeline, on request."""

import logging
import time
from collections.abc import Callable

from router.core.core import RouterCore
from router.discovery.attach import sentences
from router.observability.event_timeline import EventTimeline
from router.protocol.replies import TrustState

log = logging.getLogger(__name__)

_UNEXPLAINED = (TrustState.DEGRADED, TrustState.LAGGING)
"""States for which the sentence about an engine need not contain the reason."""


class Announcer:
    """One sentence about each engine, said when it changes. `sentences`: by worker id.

    `show`: prints a line on a terminal, where it takes the place of the log's.
    """

    def __init__(
        self, core: RouterCore, timeline: EventTimeline, show: Callable[[str], None] | None = None
    ) -> None:
        self._core = core
        self._timeline = timeline
        self._show = show
        self._said: dict[int, str] = {}
        self._expected: set[int] = set()
        self.sentences: dict[int, str] = {}

    def expect(self, worker_id: int) -> None:
        """Count an engine of which nothing is known yet."""
        self._expected.add(worker_id)

    def know(self, worker_id: int, sentence: str) -> None:
        """Set the sentence about an engine, of which more will be known soon."""
        self.sentences[worker_id] = sentence

    def say(self, worker_id: int, sentence: str, *, is_good: bool) -> None:
        """Set the sentence about an engine; it is said if it is new."""
        self.sentences[worker_id] = sentence
        if self._said.get(worker_id) != sentence:
            self._said[worker_id] = sentence
            self._write(worker_id, sentence, is_good=is_good)

    def note(self, worker_id: int, event: str) -> None:
        """Say an event that is not what is known from now on."""
        self._write(worker_id, event, is_good=True)

    def forget(self, worker_id: int) -> None:
        """Forget an engine that is not followed any more."""
        self._expected.discard(worker_id)
        self.sentences.pop(worker_id, None)
        self._said.pop(worker_id, None)

    def _write(self, worker_id: int, text: str, *, is_good: bool) -> None:
        if self._show is not None:
            self._show(text + self._state(worker_id, text))
        else:
            (log.info if is_good else log.warning)("%s", text)
        self._timeline.note(
            "worker_attached", "good" if is_good else "fault", f"worker {worker_id}", text
        )

    def _state(self, worker_id: int, text: str) -> str:
        """Return the trust in an engine's ranks as of now, or how many workers can be chosen.

        Of ranks that are degraded or lagging, which may be for a moment only, the first reason is
        included, unless the text contains one.
        """
        fleet, now_s = self._core.fleet, time.monotonic()
        worker = fleet.get(worker_id)
        if worker is None:
            ready = sum(fleet.is_schedulable(each) for each in fleet)
            return sentences.not_ready(ready, len(self._expected))
        trusts = {rank.dp_rank: self._core.trust(rank, now_s) for rank in worker.ranks}
        states = {each.state for each in trusts.values()}
        if len(states) != 1 or TrustState.BLIND in states:
            return ""
        state = states.pop()
        held = (f"{r.dp_rank}: {self._core.index.held_blocks(r)}" for r in worker.ranks)
        reasons = [each.reason for each in trusts.values() if each.reason is not None]
        is_new = state in _UNEXPLAINED and state not in text
        why = f": {reasons[0]}" if is_new and reasons else ""
        return f": {state} ({', '.join(held)} blocks){why}"
