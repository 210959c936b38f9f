"""Reservation with failover: avoids workers that failed this request or fail in general."""

import asyncio
from collections.abc import Collection

from router.client import Reservation, RouterClient
from router.forward.placement import elsewhere
from router.forward.resilience.circuit_breaker import CircuitBreaker
from router.protocol.requests import SelectRequest
from router.scheduler.errors import NoEndpointsError

UNHEARD_S = (0.05, 0.2, 0.5)
"""Delays between retries while no worker is registered, in seconds.

Over HTTP a router responds from its start, before any worker has registered; on the bus, it may
know the workers of some models only.
"""


async def reserve_with_failover(
    router: RouterClient, breaker: CircuitBreaker, request: SelectRequest, failed: Collection[int]
) -> Reservation:
    """Reserve a rank, without failed workers, and without ejected ones if others are available.

    The caller must leave the reservation.
    """
    ejected = () if request.pinned_worker else breaker.ejected()
    left_alone = {*ejected}.difference(failed) if ejected else ejected
    if left_alone:
        try:
            return await router.reserved(elsewhere(request, {*left_alone, *failed}))
        except NoEndpointsError as error:
            if error.retry_after_s is not None:
                raise
    if failed:
        return await router.reserved(elsewhere(request, failed))
    for pause_s in UNHEARD_S:
        try:
            return await router.reserved(request)
        except NoEndpointsError as error:
            if error.retry_after_s is not None:  # the request has waited for a worker
                raise
            await asyncio.sleep(pause_s)
    return await router.reserved(request)
