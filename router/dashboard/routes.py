"""The page's own routes, which are no interface: they change as the page does, and `/docs` says
nothing of them.
"""

from typing import Annotated, Any

from msgspec import Meta, Struct

from router.http.routes import BODY, Route
from router.logged_decisions import LoggedDecision
from router.protocol.requests import SelectRequest

MAX_TEXT_CHARACTERS = 256 * 1024

Text = Annotated[str, Meta(min_length=1, max_length=MAX_TEXT_CHARACTERS)]


class LookRequest(SelectRequest, frozen=True, kw_only=True):
    """Where would this prompt go? `text` instead of tokens: an engine says what they are; `is_chat`
    of a chat that begins with it.
    """

    text: Text | None = None
    is_chat: bool = False


class Look(Struct, frozen=True):
    """Where a prompt would go. `tokenized_by`: the worker whose engine was asked for its tokens, of
    which `first_tokens` are a few.
    """

    decision: LoggedDecision
    tokenized_by: str | None
    first_tokens: list[int]


PAGE_ROUTES = (
    Route("GET", "/", "page", "The dashboard", Any),
    Route("GET", "/dashboard/files/{name}", "file", "A part of it", Any, refusals=(404,)),
    Route("GET", "/dashboard/stream", "stream", "What it shows", Any, refusals=(503,)),
    Route(
        "POST",
        "/dashboard/look",
        "look",
        "Where a prompt would go, and why; books nothing",
        Look,
        LookRequest,
        refusals=(*BODY, 503),
    ),
)
