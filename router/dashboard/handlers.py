"""HTTP handlers of the page, of its stream, and of its placement previews.

The page's own routes, which are no public interface.

They change with the page, and are not listed in `/docs`.
"""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

from fastapi import FastAPI, Request, Response
from msgspec import Meta, Struct
from msgspec.structs import replace
from starlette.exceptions import HTTPException

from router.api.caller_commands import Preview
from router.api.commands import Commands
from router.api.http.routes import BODY, Route
from router.api.http.web import Web, json_answer, json_bytes
from router.core.views.decisions import LoggedDecision
from router.dashboard.page_files import PageFile, page_files
from router.dashboard.streams import EventStream, Streams
from router.dashboard.tokenizing import PromptTokenizer
from router.errors import InvalidFieldError
from router.observability.metrics import RouterMetrics
from router.protocol.requests import SelectRequest
from router.runtime.http_server.config import BodyConfig
from router.runtime.security.guarded import caller_of, is_still_admitted

MAX_TEXT_CHARACTERS = 256 * 1024

Text = Annotated[str, Meta(min_length=1, max_length=MAX_TEXT_CHARACTERS)]


class LookRequest(SelectRequest, frozen=True, kw_only=True):
    """A request to preview a prompt's placement.

    `text`: in place of tokens; an engine tokenizes it. `is_chat`: True if the text is the first
    message of a chat.
    """

    text: Text | None = None
    is_chat: bool = False


class Look(Struct, frozen=True):
    """A preview of a prompt's placement.

    `tokenized_by`: the worker with the engine that tokenized the text. `first_tokens`: the first
    few tokens.
    """

    decision: LoggedDecision
    tokenized_by: str | None
    first_tokens: list[int]


PAGE_ROUTES = (
    Route("GET", "/", "page", "The dashboard", Any),
    Route("GET", "/dashboard/files/{name}", "file", "A dashboard file", Any, refusals=(404,)),
    Route("GET", "/dashboard/stream", "stream", "Frames of the dashboard", Any, refusals=(503,)),
    Route("GET", "/dashboard/decisions", "decisions", "Remembered decisions", Any),
    Route(
        "POST",
        "/dashboard/look",
        "look",
        "Preview of a prompt's placement, without a reservation",
        Look,
        LookRequest,
        refusals=(*BODY, 503),
    ),
)


LOOKED_AT = 16
"""The number of candidates in a preview: the chosen one, and the cheapest of the others."""

SHOWN_TOKENS = 16


class Pages:
    """The handlers of `PAGE_ROUTES`. `decisions`: returns the remembered ones, encoded."""

    def __init__(
        self,
        bodies: BodyConfig,
        commands: Commands,
        streams: Streams,
        decisions: Callable[[], bytes],
        tokenizing: PromptTokenizer,
        metrics: RouterMetrics,
    ) -> None:
        self._web = Web("dashboard", PAGE_ROUTES, bodies, metrics)
        self._commands = commands
        self._streams = streams
        self._decisions = decisions
        self._tokenizing = tokenizing
        self._files = page_files()

    def reconfigure(self, bodies: BodyConfig) -> None:
        """Apply changed limits."""
        self._web.reconfigure(bodies)

    def add_to(self, app: FastAPI) -> None:
        """Add the page's routes to an application."""
        self._web.add_routes(app, self, is_documented=False)

    async def page(self, request: Request) -> Response:
        """Return the page itself."""
        return _file_answer(request, self._files["index.html"])

    async def file(self, request: Request) -> Response:
        """Return a file of the page."""
        found = self._files.get(request.path_params["name"])
        if found is None:
            raise HTTPException(404)
        return _file_answer(request, found)

    async def stream(self, request: Request) -> Response:
        """Return the stream of frames, which ends once its token no longer admits it."""
        stream = self._streams.join(partial(is_still_admitted, request.scope))
        return EventStream(self._streams, stream)

    async def decisions(self, _: Request) -> Response:
        """Return all remembered decisions, oldest first."""
        return json_bytes(self._decisions())

    async def look(self, request: Request) -> Response:
        """Return the placement of a prompt, without a reservation."""
        body = await self._web.body(request, LookRequest)
        caller, tokenized_by = caller_of(request.scope), None
        caller.bound(body)  # before an engine tokenizes anything
        if body.text is not None:
            if body.token_ids is not None:
                raise InvalidFieldError("text", "beside token_ids", "one of the two")
            scope = self._commands.splits.engines_of(body.scope)
            tokenized = await self._tokenizing.tokens(scope, body.text, is_chat=body.is_chat)
            body, tokenized_by = (
                replace(body, token_ids=tokenized.token_ids, text=None),
                tokenized.by,
            )
        first_tokens = (body.token_ids or [])[:SHOWN_TOKENS]
        preview = Preview(body, LOOKED_AT)
        decision = await self._commands.reply_to(preview, caller)
        return json_answer(Look(decision, tokenized_by, first_tokens))


def _file_answer(request: Request, file: PageFile) -> Response:
    if file.is_known(request.headers.get("if-none-match")):
        return Response(status_code=304, headers=file.headers)
    return Response(file.content, headers=file.headers)
