"""How questions get to a router."""

from typing import Protocol, TypeVar

from router.client.calls import Question

T = TypeVar("T")


class Transport(Protocol):
    """One way to a router."""

    async def ask(self, question: Question[T], headers: dict[str, str], timeout_s: float) -> T:
        """The answer to one attempt. Raises what the router refuses with, and UnansweredError."""
        ...
