"""Where a request may be tried, booked: with those that have failed it no more."""

import asyncio
from collections.abc import Collection
from contextlib import suppress

from router.client import Reservation, RouterClient
from router.forward.placing import elsewhere
from router.forward.standing import Standing
from router.placement_errors import NoEndpointsError
from router.protocol.requests import SelectRequest

UNHEARD_S = (0.05, 0.2, 0.5)
"""Pauses before asking again where there is nobody at all. Over HTTP a router answers from its
start, before it has heard of any worker; on the bus, it may know the workers of some models only.
"""


async def book(
    router: RouterClient, standing: Standing, request: SelectRequest, failed: Collection[int]
) -> Reservation:
    """Without those that failed it, and those that fail everybody, unless nobody else is there. To
    be left.
    """
    ejected = () if request.pinned_worker else standing.ejected()
    left_alone = {*ejected}.difference(failed) if ejected else ejected
    if left_alone:
        with suppress(NoEndpointsError):
            return await router.reserved(elsewhere(request, {*left_alone, *failed}))
    if failed:
        return await router.reserved(elsewhere(request, failed))
    for pause_s in UNHEARD_S:
        try:
            return await router.reserved(request)
        except NoEndpointsError:
            await asyncio.sleep(pause_s)
    return await router.reserved(request)
