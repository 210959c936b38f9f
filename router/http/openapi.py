"""What OpenAPI says of the routes. Schemas come from the types that decode and encode."""

from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import FastAPI

from router.http.examples import EXAMPLES
from router.http.routes import Refusal, Route
from router.http.words import describe
from router.protocol.batches import ReservationStep
from router.protocol.values import U64_MAX

ABOUT = """
Every refusal is JSON: `error`, a sentence; `code`, for programs; and fields of its own, such as
`field`, `reason` and `allowed`. Where the process has a `token_file`, all but `/health`, `/ready`
and this page want `authorization: Bearer …`: 401 without, 403 for a token that may not, 429 for one
that asks too often. Anything may be answered with 503 (`too_many_requests`), 431 or 408 (headers
too large, or too slow). `x-request-id` and `traceparent` come back as they came, or are made.
"""

_REASONS = {
    400: "the body is not JSON, or contradicts itself",
    404: "no such worker, reservation or index",
    408: "the body did not arrive in time",
    409: "the id is taken, or what is there contradicts it",
    413: "the body is too large",
    415: "the body is not application/json",
    422: "a field is missing, or has the wrong type or range",
    429: "as much of this tenant waits as its share of a full queue; see Retry-After",
    501: "this version lacks it",
    503: "no worker can take the request now",
    529: "all are busy and no more may wait, or it waited too long; see Retry-After",
}


def document(app: FastAPI, routes: Sequence[Route]) -> None:
    """Add the schemas of bodies and answers to what the app says of itself."""
    types = [t for route in routes for t in (route.body, route.answer) if t is not None]
    named = [*types, Refusal, ReservationStep]  # items of batches are named, not typed
    _, components = msgspec.json.schema_components(named, ref_template=_REF)
    describe(components, named)
    for name in ("PromptRequest", "SelectRequest"):
        if name in components:
            components[name]["anyOf"] = _PROMPTS
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        schema = generate()
        schema.setdefault("components", {}).setdefault("schemas", {}).update(components)
        return schema

    app.openapi = openapi  # type: ignore[method-assign]


def extra(route: Route) -> dict[str, Any]:
    """Parameters, request body and responses of a route, in OpenAPI's terms."""
    result: dict[str, Any] = {
        "responses": {str(route.status): _content("The answer", route.answer)}
        | {str(status): _content(_REASONS[status], route.refusal) for status in route.refusals}
    }
    if route.body is not None:
        content = _content("", route.body)["content"]
        content["application/json"]["example"] = EXAMPLES[route.handler]
        if route.takes_binary:
            content["application/octet-stream"] = {"schema": _TOKENS}
        result["requestBody"] = {"required": not _is_optional(route.body), "content": content}
    names = [part.strip("{}") for part in route.path.split("/") if part.startswith("{")]
    parameters = [_parameter(name) for name in names]
    parameters += [_query_parameter(name, text) for name, text in route.query.items()]
    if parameters:
        result["parameters"] = parameters
    return result


_TOKENS = {
    "type": "string",
    "format": "binary",
    "description": "token_ids, each a little-endian u32; the other fields as query parameters: "
    "texts as they are, all else as JSON",
}


_REF = "#/components/schemas/{name}"

_NUMBERS = ("worker_id", "sequence_hash")
"""Parts of paths that are numbers."""

_PROMPTS = [
    {"required": ["token_ids"], "properties": {"token_ids": {"type": "array"}}},
    {
        "required": ["sequence_hashes", "isl_tokens"],
        "properties": {"sequence_hashes": {"type": "array"}, "isl_tokens": {"type": "integer"}},
    },
]
"""A prompt comes as tokens or as hashes."""


def _is_optional(body: Any) -> bool:
    return type(None) in getattr(body, "__args__", ())


def _content(description: str, answer: Any) -> dict[str, Any]:
    (schema,), _ = msgspec.json.schema_components([answer], ref_template=_REF)
    media_type = "text/plain" if answer is str else "application/json"
    return {"description": description, "content": {media_type: {"schema": schema}}}


def _query_parameter(name: str, description: str) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    if name in ("worker_id", "dp_rank"):
        schema = {"type": "integer", "minimum": 0, "maximum": U64_MAX}
    return {"name": name, "in": "query", "description": description, "schema": schema}


def _parameter(name: str) -> dict[str, Any]:
    schema = {"type": "string", "minLength": 1}
    if name in _NUMBERS:
        schema = {"type": "integer", "minimum": 0, "maximum": U64_MAX}
    return {"name": name, "in": "path", "required": True, "schema": schema}
