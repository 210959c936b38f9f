"""Reservations handed over at shutdown, and progress still to be sent to their recipients.

  give ─▶ heir ─▶ "freed": it is booked there now      as many of these as it was handed over
  a caller, another router ─▶ "freed": it has ended    one more than that: the heirs are notified

Both are the same message, in any order. An end that is reported while a handover is in flight is
also sent to the heir, which would otherwise keep the reservation forever.
"""

from collections.abc import Callable, Collection, Iterable
from typing import TypeAlias

from msgspec import Struct

from router.protocol.replicas import ProgressTold, ReservationFreed

Owners: TypeAlias = Callable[[str], Collection[int]]


class _Transfer(Struct):
    """A reservation handed over: its recipients, the number of handovers and of "freed" messages.

    `is_yielded`: a frame of an heir, in which the reservation is booked, arrived before the heir's
    "freed" message.
    """

    recipients: tuple[int, ...] = ()
    times: int = 0
    freed: int = 0
    is_yielded: bool = False


class Handover:
    """Reservations handed over, by request id. It exists until its router stops."""

    __slots__ = ("_given",)

    def __init__(self) -> None:
        self._given: dict[str, _Transfer] = {}

    def give(self, heir: int, request_ids: Iterable[str]) -> None:
        """Record that these reservations are handed over to a router."""
        for request_id in request_ids:
            given = self._given.setdefault(request_id, _Transfer())
            given.times += 1
            given.recipients = (*dict.fromkeys((*given.recipients, heir)),)

    def take_back(self, request_ids: Iterable[str]) -> None:
        """Forget these: they were handed to this router, which may have handed them over itself.

        This happens if two routers stop at once.
        """
        for request_id in request_ids:
            self._given.pop(request_id, None)

    @property
    def request_ids(self) -> Collection[str]:
        """The ids of all reservations that were handed over."""
        return self._given.keys()

    def yielded(self, request_ids: Iterable[str]) -> None:
        """Record that a frame of an heir books these, so that they are no longer booked here."""
        for request_id in request_ids:
            self._given[request_id].is_yielded = True

    def recipients(self, message: ProgressTold, *, is_booked: bool) -> tuple[int, ...]:
        """Return the routers to which the progress of a reservation is to be forwarded.

        `is_booked`: whether this router had the reservation until then. If not, and no other router
        was the reason, a caller of this router has ended it.
        """
        given = self._given.get(message.request_id)
        if given is None:
            return ()
        if not isinstance(message.told, ReservationFreed):
            return given.recipients
        is_ended_here = not (is_booked or given.freed or given.is_yielded)
        given.freed += 2 if is_ended_here else 1
        return given.recipients if given.freed > given.times else ()

    def is_settled(self, request_ids: Iterable[str], owners: Owners) -> bool:
        """Return whether each reservation is booked with an heir, or its end was reported there.

        `owners`: returns the other routers that report a booking of a request.
        """
        return all(self._is_settled(each, owners) for each in request_ids)

    def _is_settled(self, request_id: str, owners: Owners) -> bool:
        given = self._given.get(request_id)
        if given is None or given.freed > given.times:
            return True
        # The only "freed" message may be from a caller, with the handover still in flight.
        return given.freed == given.times and not set(given.recipients).isdisjoint(
            owners(request_id)
        )
