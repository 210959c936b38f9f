"""HTTP: the page, what it shows, and its question where a prompt would go."""

from fastapi import FastAPI, Request, Response
from msgspec.structs import replace
from starlette.exceptions import HTTPException

from router.commands import Commands
from router.config import RouterConfig
from router.dashboard.event_stream import EventStream
from router.dashboard.page_files import PageFile, page_files
from router.dashboard.routes import PAGE_ROUTES, Look, LookRequest
from router.dashboard.streams import Streams
from router.dashboard.tokenizing import Tokenizing
from router.errors import InvalidFieldError
from router.http.web import Web, caller_of, json_answer
from router.metrics import RouterMetrics
from router.tenant_commands import commands_of

LOOKED_AT = 16
"""Candidates in an answer: the chosen one, and the cheapest of the others."""

SHOWN_TOKENS = 16


class Pages:
    """The handlers of `PAGE_ROUTES`."""

    def __init__(
        self,
        config: RouterConfig,
        commands: Commands,
        streams: Streams,
        tokenizing: Tokenizing,
        metrics: RouterMetrics,
    ) -> None:
        self._web = Web("dashboard", PAGE_ROUTES, config, metrics)
        self._commands = commands
        self._streams = streams
        self._tokenizing = tokenizing
        self._files = page_files()

    def reconfigure(self, config: RouterConfig) -> None:
        """Go on with other limits."""
        self._web.reconfigure(config)

    def add_to(self, app: FastAPI) -> None:
        """Serve the page there, too."""
        self._web.add_routes(app, self, is_documented=False)

    async def page(self, request: Request) -> Response:
        """The page itself."""
        return _file_answer(request, self._files["index.html"])

    async def file(self, request: Request) -> Response:
        """A file of it."""
        found = self._files.get(request.path_params["name"])
        if found is None:
            raise HTTPException(404)
        return _file_answer(request, found)

    async def stream(self, _: Request) -> Response:
        """What it shows, while it is looked at."""
        return EventStream(self._streams, self._streams.join())

    async def look(self, request: Request) -> Response:
        """Where a prompt would go."""
        body = await self._web.body(request, LookRequest)
        commands = commands_of(self._commands, caller_of(request))
        tokenized_by = None
        if body.text is not None:
            if body.token_ids is not None:
                raise InvalidFieldError("text", "beside token_ids", "one of the two")
            said = await self._tokenizing.tokens(body.scope, body.text, is_chat=body.is_chat)
            body, tokenized_by = replace(body, token_ids=said.token_ids, text=None), said.by
        first_tokens = (body.token_ids or [])[:SHOWN_TOKENS]
        decision = await commands.look(body, LOOKED_AT)
        return json_answer(Look(decision, tokenized_by, first_tokens))


def _file_answer(request: Request, file: PageFile) -> Response:
    if file.is_known(request.headers.get("if-none-match")):
        return Response(status_code=304, headers=file.headers)
    return Response(file.content, headers=file.headers)
