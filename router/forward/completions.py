"""Requests of all generating APIs: admission, parsing, forwarding, counting."""

import re

import msgspec

from router.errors import InvalidFieldError, KvRouterError
from router.forward.apis.api import APIS
from router.forward.apis.forms import FORM
from router.forward.apis.passed import PASSED
from router.forward.config import ForwardConfig
from router.forward.cors import Cors
from router.forward.errors import ModelNotFoundError, error_response, error_status
from router.forward.headers import DROPPED_FIELDS, REQUEST_ID
from router.forward.kept_routes import BEFORE_ID, KeptRoutes, kept_routes
from router.forward.metrics import Ended, ForwardMetrics
from router.forward.permitted_fields import permitted
from router.forward.preparation import ForwardRequest, Preparation, PreparedRequest, read_request
from router.forward.push import Forwarder
from router.forward.request_body import CompletionRequest
from router.forward.request_templates import RequestTemplate
from router.forward.resilience.worker_list import WorkerList
from router.runtime.http_server.admission import Admission, AdmissionLimits
from router.runtime.http_server.exchange import (
    JSON,
    Exchange,
    FirstLines,
    HotRoute,
    RequestHeads,
    encoded_headers,
)
from router.runtime.http_server.write_batch import WriteBatch
from router.runtime.process.errors import MalformedBodyError
from router.scheduler.errors import NoEndpointsError

_SHOWABLE = re.compile(r"[A-Za-z0-9_.-]{1,64}").fullmatch
_MOST_SHOWN = 8


def limits_of(config: ForwardConfig) -> AdmissionLimits:
    """Return the limits of requests in a configuration."""
    return AdmissionLimits(
        config.http.max_requests,
        config.bodies.body_limit_bytes,
        config.bodies.body_timeout_s,
        config.completions.bodies_limit_bytes,
    )


class Completions:
    """Serves calls. Each is admitted once, and then answered, refused or abandoned."""

    def __init__(
        self,
        push: Forwarder,
        preparation: Preparation,
        metrics: ForwardMetrics,
        admission: Admission,
        roster: WorkerList,
        cors: Cors,
    ) -> None:
        self.admission = admission
        self.heads = RequestHeads(BEFORE_ID)
        self.lines = FirstLines()
        self.writes = WriteBatch(admission.overload)
        self._routes = {
            ("POST", path): HotRoute(
                path, self._answered, (JSON,), ends_with_client=True, errors=api.errors
            )
            for path, api in APIS.items()
        } | {
            ("POST", path): HotRoute(
                path,
                self._answered,
                (FORM if route.is_form else JSON,),
                ends_with_client=True,
                errors=route.api.errors,
            )
            for path, route in PASSED.items()
        }
        self._push = push
        self._preparation = preparation
        self._metrics = metrics
        self._roster = roster
        self._cors = cors
        self._kept = KeptRoutes(push.kept, preparation.placing, push, roster)
        self._kept_routes = kept_routes(self._kept.answer)

    def reconfigure(self, config: ForwardConfig) -> None:
        """Apply changed limits, those of `settings.LIVE`."""
        self.admission.limits = limits_of(config)

    def unready_reason(self) -> str | None:
        """Return why no request can be served, or None."""
        return self._roster.unready_reason()

    def tokenizers(self) -> dict[str, object]:
        """Return what engines and this process make of prompts, for `/ready`."""
        return {"tokenizers": self._preparation.tokenizing.described()}

    def find(self, method: str, path: str) -> HotRoute | None:
        """Return the route of a generating API, or of a response; None for others."""
        route = self._routes.get((method, path))
        if route is None and path.startswith(BEFORE_ID):
            response_id, _, behind_id = path[len(BEFORE_ID) :].partition("/")
            return self._kept_routes.get((method, behind_id)) if response_id else None
        return route

    def refused(self, call: Exchange, error: KvRouterError) -> None:
        """Count a refusal."""
        self._metrics.refusals.labels(error.code).inc()
        if not call.own_lines:  # refused before its answer began
            call.own_lines = self._lines(call)
        self._count(call, "refused" if error.http_status < 500 else "failed")

    def abandoned(self, call: Exchange) -> None:
        """Count a call that was cancelled, mostly because its client has disconnected."""
        self._count(call, "client_gone" if call.disconnected else "failed")

    def error_reply(self, error: KvRouterError) -> tuple[int, object]:
        """Return the status and the body of an error response, for clients of OpenAI."""
        return error_status(error), error_response(error)

    def _count(self, call: Exchange, ended: Ended) -> None:
        self._metrics.requests.count(f"{call.head.method} {call.head.route.path}", ended)

    async def answer(self, call: Exchange) -> None:
        """Answer a call with a complete body. Raises the error that refuses it."""
        call.own_lines = self._lines(call)
        self._count(call, await call.head.route.handler(call))

    async def _answered(self, call: Exchange) -> Ended:
        asked, words = await _read(call)
        asked, dropped = permitted(asked, call.caller)
        if dropped:
            words = None  # its engine bodies have these fields
            self._note_dropped(call, dropped)
        headers = (*call.head.pairs, *call.traces) if call.traces else call.head.pairs
        request = self._preparation.placing.request_in(words, asked, headers, call.caller)
        request = self._kept.pinned(asked, request)
        tenant = call.caller.tenant
        prepared = await self._preparation.prepared(asked, request, headers, tenant)
        asked, request, tokens = prepared.asked, prepared.request, prepared.tokens
        try:
            if asked.is_query:
                return await self._placement_only(prepared, call)
            counted = len(tokens.token_ids) if tokens.are_counted else None
            is_whole = tokens.are_certain and tokens.block_mm_infos is None
            errand = ForwardRequest(
                asked,
                headers,
                request,
                call.ids.request_id,
                counted,
                tokens.token_ids if is_whole else None,
                words,
                tokens.confirms,
            )
            return await self._push.forward(errand, call)
        except (InvalidFieldError, MalformedBodyError):
            asked.check_prompt()  # names the client's field in the error
            raise
        except NoEndpointsError as error:
            await self._kept.check_lost(asked, request)
            if await self._roster.is_unknown(asked.model):
                raise ModelNotFoundError(asked.model, self._roster.models) from error
            raise

    def _lines(self, call: Exchange) -> bytes:
        """Return the headers of every response to a call."""
        return _id_line(call) + self._cors.lines(call.head.headers.get(b"origin"))

    def _note_dropped(self, call: Exchange, names: list[str]) -> None:
        """Tell the client which fields its engine does not receive."""
        self._metrics.dropped_fields.inc(len(names))
        shown = [name for name in names if _SHOWABLE(name)][:_MOST_SHOWN]
        said = f"{len(names)} dropped; no tenant may send {', '.join(shown) or 'them'}"
        call.own_lines += encoded_headers([(DROPPED_FIELDS, said.encode("ascii"))])

    async def _placement_only(self, prepared: PreparedRequest, call: Exchange) -> Ended:
        """Send the placement of a request, and its tokens, which the client may reuse."""
        asked, request, tokens = prepared.asked, prepared.request, prepared.tokens
        decision = await self._push.router.select(request)
        prefill = await self._push.prefill.place(request)
        place = {"decode_worker_id": decision.worker_id, "decode_dp_rank": decision.dp_rank}
        if prefill is not None:
            place |= {"prefill_worker_id": prefill.worker_id, "prefill_dp_rank": prefill.dp_rank}
        said: dict[str, object] = {"worker_id": place, "overlap_blocks": decision.overlap_blocks}
        if tokens.are_certain:
            said["token_ids"] = list(tokens.token_ids)
        kind = asked.api.answer_object
        body = {"id": call.ids.request_id, "object": kind, "model": asked.model, "choices": []}
        call.json(msgspec.json.encode({**body, "nvext": said}))
        return "query"


async def _read(call: Exchange) -> tuple[CompletionRequest, RequestTemplate | None]:
    """Parse a call's body. Returns also its cached template, or None."""
    head = call.head
    if head.derived is None and head.is_repeated:
        head.derived = []
    kind = head.headers.get(b"content-type", b"")
    return await read_request(head.route.path, call.body(), kind, head.derived)


def _id_line(call: Exchange) -> bytes:
    return encoded_headers([(REQUEST_ID, call.ids.request_id.encode())])
