"""A rank's state file: read when its follower starts, written when it is due and at the end."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from router.protocol.values import Rank
from router.publisher.engine_position import SavedPosition
from router.publisher.errors import FeedStateError, NormalizerStateError
from router.publisher.feed_state import load_feed_state, save_feed_state
from router.publisher.normalizer import Normalizer
from router.publisher.normalizer_state import SavedParts

log = logging.getLogger(__name__)

ReadState: TypeAlias = Callable[[], tuple[SavedPosition, SavedParts]]


class KeptState:
    """One rank's. Without a path nothing is kept."""

    __slots__ = ("_keeping", "_path", "_rank")

    def __init__(self, rank: Rank, path: Path | None) -> None:
        self._rank = rank
        self._path = path
        self._keeping = asyncio.Lock()

    def restored(self, normalizer: Normalizer, now_s: float) -> SavedPosition | None:
        """Where a former process stopped, if the normaliser could be brought there."""
        try:
            state = None if self._path is None else load_feed_state(self._path)
            if state is None:
                return None
            normalizer.load(state.normalizer, now_s)
        except (FeedStateError, NormalizerStateError) as error:
            log.warning("rank %s: %s; asking the engine for everything", self._rank, error)
            self._set_aside()
            return None
        return state.position

    async def keep(self, read: ReadState) -> None:
        """Write what `read` says when it is our turn; one after the other, also where the one
        before was cancelled while the disk wrote. A thread reads and writes: until this returns
        nobody changes what is read.
        """
        async with self._keeping:
            if self._path is None:
                return
            try:
                await asyncio.to_thread(_write, self._path, read)
            except FeedStateError as error:
                log.warning("rank %s: state not kept: %s", self._rank, error)

    def _set_aside(self) -> None:
        """Keep a file that is of no use, so that somebody can look at it: the last of each rank."""
        if self._path is None:
            return
        aside = self._path.with_name(self._path.name + ".damaged")
        with suppress(OSError):
            self._path.replace(aside)
            log.warning("rank %s: that file is kept as %s", self._rank, aside)


def _write(path: Path, read: ReadState) -> None:
    save_feed_state(path, *read())
