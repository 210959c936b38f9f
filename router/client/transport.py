"""How questions get to a router."""

from typing import Protocol, TypeVar

from router.client.calls import Question
from router.client.settings import Patience

T = TypeVar("T")


class Transport(Protocol):
    """One way to a router."""

    async def ask(self, question: Question[T], headers: dict[str, str], patience: Patience) -> T:
        """The answer to one attempt. Raises what the router refuses with, and UnansweredError."""
        ...
