"""What a router that stops gave to others, and what of it they still have to hear.

    give ─▶ heir ─▶ "freed": it is booked there now       as many of these as it was given away
    a caller, another router ─▶ "freed": it has ended     one more than that: the heirs are told

Both come in the same words, in any order: an end that somebody tells while a gift is on its way
reaches the heir, too, or it would keep for ever what nobody frees any more.
"""

from collections.abc import Callable, Collection, Iterable
from typing import TypeAlias

from msgspec import Struct

from router.protocol.replicas import ProgressTold, ReservationFreed

Owners: TypeAlias = Callable[[str], Collection[int]]


class _Given(Struct):
    """To whom, how often, and how often it was heard to be freed. `is_yielded`: an heir's frame, in
    which it is booked, came before the heir's word.
    """

    heirs: tuple[int, ...] = ()
    times: int = 0
    freed: int = 0
    is_yielded: bool = False


class Bequest:
    """Requests given away, by id. It lives as long as its router still does."""

    __slots__ = ("_given",)

    def __init__(self) -> None:
        self._given: dict[str, _Given] = {}

    def give(self, heir: int, request_ids: Iterable[str]) -> None:
        """These are given to a router now."""
        for request_id in request_ids:
            given = self._given.setdefault(request_id, _Given())
            given.times += 1
            given.heirs = (*dict.fromkeys((*given.heirs, heir)),)

    def take_back(self, request_ids: Iterable[str]) -> None:
        """These were given to us, who may have given them: two routers stop at once."""
        for request_id in request_ids:
            self._given.pop(request_id, None)

    @property
    def request_ids(self) -> Collection[str]:
        """What was given away, for good or not."""
        return self._given.keys()

    def yielded(self, request_ids: Iterable[str]) -> None:
        """These are booked here no more since a frame has shown them booked with an heir."""
        for request_id in request_ids:
            self._given[request_id].is_yielded = True

    def heirs(self, message: ProgressTold, *, is_booked: bool) -> tuple[int, ...]:
        """Who has to hear what we are told. `is_booked`: whether we had the reservation until then;
        if not, and no other router was the reason, a caller of ours has ended it.
        """
        given = self._given.get(message.request_id)
        if given is None:
            return ()
        if not isinstance(message.told, ReservationFreed):
            return given.heirs
        is_ended_here = not (is_booked or given.freed or given.is_yielded)
        given.freed += 2 if is_ended_here else 1
        return given.heirs if given.freed > given.times else ()

    def is_settled(self, request_ids: Iterable[str], owners: Owners) -> bool:
        """Whether each is booked with an heir now, or its end was told there. `owners`: who else
        says that it has booked a request.
        """
        return all(self._is_settled(each, owners) for each in request_ids)

    def _is_settled(self, request_id: str, owners: Owners) -> bool:
        given = self._given.get(request_id)
        if given is None or given.freed > given.times:
            return True
        # The one word that was heard may have been a caller's, and the gift still on its way.
        return given.freed == given.times and not set(given.heirs).isdisjoint(owners(request_id))
