"""A search for blocks at other workers, whose answers say from which to load.

    ask ─▶ a thread for each peer ─▶ Find ─▶ take_answers: the places; source_of: at which peer

Answers say where blocks were, not where they are: one that is gone is missing in the load, and is
computed. A peer that does not answer in time is left alone for a while, so that it delays few.
"""

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TypeAlias

from msgspec import Struct

from router.protocol.values import Rank
from worker_agent.blocks.descriptors import PeerSource
from worker_agent.sharing.errors import BlocksetError
from worker_agent.sharing.pause import Pause
from worker_agent.sharing.peer_client import PeerClient

log = logging.getLogger(__name__)

FIND_S = 0.5
"""Timeout of a question to a peer, which connects first if need be."""
MAX_FOUND_BLOCKS = 65_536
"""Limit of blocks of which the peer is remembered; the least recently found is forgotten."""

Connect: TypeAlias = Callable[[str], PeerClient]


class _Reply(Struct, frozen=True):
    """A peer's answer. `places`: None if it did not answer."""

    number: int
    peer: "_Peer"
    places: list[int] | None


class _Peer:
    """One peer and its thread, which alone uses the client."""

    __slots__ = ("_client", "_clock", "_closing", "_pause", "_thread", "address", "asked_s")

    def __init__(self, address: str, client: PeerClient, clock: Callable[[], float]) -> None:
        self.address = address
        self.asked_s: deque[float] = deque()
        """When its open questions were asked; belongs to the finder's owner."""
        self._client = client
        self._clock = clock
        self._closing = False
        self._pause = Pause(clock)
        self._thread = ThreadPoolExecutor(1, "peer-finder")

    @property
    def rank(self) -> Rank | None:
        """The rank that answered there; None before the first answer."""
        return self._client.rank

    def ask(
        self, number: int, identities: Sequence[bytes], reply: Callable[[_Reply], None]
    ) -> None:
        def run() -> None:
            places = None
            try:
                places = self._found(identities)
            except Exception:
                log.exception("a question to %s failed", self.address)
            reply(_Reply(number, self, places))

        self.asked_s.append(self._clock())
        self._thread.submit(run)

    def leave(self) -> None:
        self._closing = True
        self._thread.submit(self._client.close)
        self._thread.shutdown(wait=False)

    def close(self) -> None:
        self.leave()
        self._thread.shutdown(wait=True)

    def _found(self, identities: Sequence[bytes]) -> list[int] | None:
        if self._closing or self._pause.is_on:
            return None
        try:
            places = self._client.find(identities)
        except BlocksetError:
            places = None
        self._pause.note(failed=places is None)
        if places is None:
            return None
        return [place for place in places if 0 <= place < len(identities)]


class _Question(Struct):
    """A question and its answers. `waits_for`: the peers that have not answered."""

    identities: Sequence[bytes]
    waits_for: int
    best: _Reply | None = None


class PeerFinder:
    """A search at some peers. Belongs to one thread; no call waits but `close`.

    Invariant: each question is answered once, at most `2 * FIND_S` after it was asked.
    """

    __slots__ = (
        "_clock",
        "_connect",
        "_found",
        "_named",
        "_open",
        "_peers",
        "_replies",
        "unanswered",
    )

    def __init__(
        self,
        addresses: Sequence[str],
        connect: Connect,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start a thread for each address. `connect`: returns a client with timeout `FIND_S`."""
        self.unanswered = 0
        """Number of questions that a peer did not answer."""
        self._clock = clock
        self._connect = connect
        self._named: Sequence[str] | None = None
        self._peers = [_Peer(each, connect(each), clock) for each in addresses]
        self._open: dict[int, _Question] = {}
        self._replies: deque[_Reply] = deque()
        self._found: OrderedDict[bytes, _Peer] = OrderedDict()

    def ask(self, number: int, identities: Sequence[bytes], source: Rank | None = None) -> None:
        """Ask which of these blocks peers have; `number` identifies the answer.

        `source`: the rank that is said to have them; others are asked only if it is unknown here.
        Peers with a question that is late already are not asked.
        """
        self._note_replies()
        self._note_named()
        named = [peer for peer in self._peers if source is not None and peer.rank == source]
        late_s = self._clock() - FIND_S
        asked = [
            peer for peer in named or self._peers if not peer.asked_s or peer.asked_s[0] >= late_s
        ]
        self._open[number] = _Question(identities, len(asked))
        for peer in asked:
            peer.ask(number, identities, self._replies.append)

    def take_answers(self) -> list[tuple[int, list[int]]]:
        """Return the questions answered since the last call, each with the places found.

        Those are of the one peer that has the longest beginning.
        """
        self._note_replies()
        over = [number for number, each in self._open.items() if not each.waits_for]
        return [(number, self._answer(self._open.pop(number))) for number in over]

    def source_of(self, identities: Sequence[bytes]) -> PeerSource | None:
        """Return the peer to load these blocks from; None if none of them was found. O(blocks)."""
        holders = [self._found.get(each) for each in identities]
        peer = next((each for each in holders if each is not None), None)
        if peer is None or peer.rank is None or peer not in self._peers:
            return None
        last = max(place for place, each in enumerate(holders) if each is peer)
        return PeerSource(peer.rank, [peer.address], last + 1)

    def use(self, addresses: Sequence[str]) -> None:
        """Ask these peers from the next question on, and no others. Any thread may call it."""
        self._named = list(dict.fromkeys(addresses))

    def close(self) -> None:
        """Disconnect, at most `FIND_S` after the call; calling it again has no effect."""
        peers, self._peers = self._peers, []
        for peer in peers:
            peer.close()

    def _note_named(self) -> None:
        """Connect the peers that are new; those left out end by themselves, without a wait."""
        addresses, self._named = self._named, None
        if addresses is None:
            return
        known = {peer.address: peer for peer in self._peers}
        for peer in self._peers:
            if peer.address not in addresses:
                peer.leave()
        self._peers = [
            known.get(each) or _Peer(each, self._connect(each), self._clock) for each in addresses
        ]

    def _note_replies(self) -> None:
        while self._replies:
            reply = self._replies.popleft()
            reply.peer.asked_s.popleft()
            question = self._open[reply.number]
            question.waits_for -= 1
            if reply.places is None:
                self.unanswered += 1
            elif question.best is None or _value(reply) > _value(question.best):
                question.best = reply

    def _answer(self, question: _Question) -> list[int]:
        best = question.best
        if best is None or best.places is None:
            return []
        for place in best.places:
            self._found[question.identities[place]] = best.peer
            self._found.move_to_end(question.identities[place])
        while len(self._found) > MAX_FOUND_BLOCKS:
            self._found.popitem(last=False)
        return best.places


def _value(reply: _Reply) -> tuple[int, int]:
    """Return the number of leading blocks found, then of all."""
    places = reply.places or []
    if places[:1] != [0]:
        return 0, len(places)
    gap = next((i for i, (one, next_) in enumerate(pairwise(places), 1) if next_ != one + 1), None)
    return gap or len(places), len(places)
