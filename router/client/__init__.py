"""The router, for callers: `RouterClient`, what it takes and what it gives."""

from router.client.client import RouterClient
from router.client.errors import RefusedError, UnansweredError
from router.client.reservation import Reservation
from router.client.settings import ClientSettings, Retries
from router.client.written_tokens import WrittenTokens
from router.protocol.batches import ItemResult, ReservationStep
from router.protocol.replies import Decision
from router.protocol.requests import PromptRequest, ReserveRequest, SelectRequest, Usage

__all__ = [
    "ClientSettings",
    "Decision",
    "ItemResult",
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
    "WrittenTokens",
]
