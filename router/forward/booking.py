"""Where a request may be tried, booked: with those that have failed it no more."""

from collections.abc import Collection

from router.client import Reservation, RouterClient
from router.errors import NoEndpointsError
from router.forward.placing import elsewhere
from router.forward.standing import Standing
from router.protocol.requests import SelectRequest


async def book(
    router: RouterClient, standing: Standing, request: SelectRequest, failed: Collection[int]
) -> Reservation:
    """Without those that failed it, and those that fail everybody, unless nobody else is there. To
    be left.
    """
    left_alone = set() if request.pinned_worker else {*standing.ejected()}.difference(failed)
    try:
        return await router.reserved(elsewhere(request, left_alone.union(failed)))
    except NoEndpointsError:
        if not left_alone:
            raise
        return await router.reserved(elsewhere(request, failed))
