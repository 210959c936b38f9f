"""The commands of callers: those that the core executes, and the following.

`prompt`: the hashed prompt; `Commands` hashes it if it is not given.
"""

from typing import TypeAlias

from msgspec import Struct

from router.core.commands import Free, OutputBlock, PrefillComplete, Select, Submit
from router.protocol.requests import (
    BookRequest,
    PotentialLoadsRequest,
    PromptRequest,
    SelectRequest,
)
from router.sequence.active.prompt import Prompt


class Book(Struct, frozen=True):
    """Book a rank that the caller chose, or a rank that was selected before.

    `session`: the request of the selection's session, if it has one. Raises
    SelectionNotFoundError, and what `Reserve` raises.
    """

    request: BookRequest
    prompt: Prompt | None = None
    session: SelectRequest | None = None


class PotentialLoads(Struct, frozen=True):
    """Return the load of each rank, were this prompt placed there. Raises NoEndpointsError."""

    request: PotentialLoadsRequest
    prompt: Prompt | None = None


class OverlapScores(Struct, frozen=True):
    """Return the cached prefix of every rank. Raises NoEndpointsError."""

    request: PromptRequest
    prompt: Prompt | None = None


class Preview(Struct, frozen=True):
    """Explain, with this limit of candidates, where a prompt would be placed.

    A preview is not counted, books nothing and binds no session.
    """

    request: SelectRequest
    candidates: int
    prompt: Prompt | None = None


class ReadShadow(Struct, frozen=True):
    """Return the comparison with another router's choices. Raises ShadowOffError."""


PromptCommand: TypeAlias = Select | Submit | Book | PotentialLoads | OverlapScores | Preview
CallerCommand: TypeAlias = PromptCommand | PrefillComplete | OutputBlock | Free | ReadShadow
