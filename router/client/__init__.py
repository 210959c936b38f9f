"""The public interface of the router's client: `InspectClient`, its arguments and its results."""

from router.client.bodies import EncodedTokens
from router.client.client import RouterClient
from router.client.errors import RefusedError, UnansweredError
from router.client.reservation import Reservation
from router.client.settings import ClientSettings, Retries
from router.protocol.batches import ItemResult, ReservationStep
from router.protocol.replies import Decision, LoadForecast
from router.protocol.requests import (
    PotentialLoadsRequest,
    PromptRequest,
    ReserveRequest,
    SelectRequest,
    Usage,
)

__all__ = [
    "ClientSettings",
    "Decision",
    "EncodedTokens",
    "ItemResult",
    "LoadForecast",
    "PotentialLoadsRequest",
    "PromptRequest",
    "RefusedError",
    "Reservation",
    "ReservationStep",
    "ReserveRequest",
    "Retries",
    "RouterClient",
    "SelectRequest",
    "UnansweredError",
    "Usage",
]
