"""The OpenAPI document of every process, with example bodies, which a test sends; and its page.

The page of `/docs` has no scripts and needs no other host: the dashboard may keep a token in this
origin, so no code of others runs in it. Pages that try requests out can be opened elsewhere with
`/openapi.json`.
"""

import json
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from html import escape
from types import MappingProxyType
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.routing import APIRoute

from router.api.http.openapi_texts import describe
from router.api.http.routes import ErrorResponse, Route
from router.protocol.batches import ReservationStep
from router.protocol.values import U64_MAX

_PROMPT = {"token_ids": list(range(32)), "model_name": "default"}
_STEPS = [
    {"request_id": "r1", "step": "prefill_complete"},
    {"request_id": "r1", "step": "output_block"},
    {"request_id": "r1", "step": "free", "usage": {"prompt_tokens": 32, "cached_tokens": 16}},
]

EXAMPLES: MappingProxyType[str, Any] = MappingProxyType(
    {
        "select": {**_PROMPT, "session_id": "conversation 7", "explain": True},
        "select_and_reserve": {**_PROMPT, "request_id": "r1", "expected_output_tokens": 200},
        "reserve": {**_PROMPT, "request_id": "r2", "worker_id": 1, "dp_rank": 0},
        "prefill_complete": {"usage": {"prompt_tokens": 32, "cached_tokens": 16}},
        "output_block": {"decay_fraction": 0.9},
        "free": {"usage": {"prompt_tokens": 32, "cached_tokens": 16}},
        "select_batch": {"requests": [_PROMPT, {**_PROMPT, "cache_salt": "acme"}]},
        "reservation_batch": {"steps": _STEPS},
        "register_worker": {
            "worker_id": 7,
            "endpoint": "http://10.0.0.7:8000",
            "block_size": 16,
            "kv_events_endpoints": {"0": "tcp://10.0.0.7:5557"},
            "replay_endpoints": {"0": "tcp://10.0.0.7:5558"},
        },
        "patch_worker": {"lifecycle": "schedulable"},
        "change_replica_peers": {"endpoint": "tcp://10.0.0.8:9000"},
        "replica_stream": {
            "router_id": 7,
            "incarnation": 1,
            "name": "r7",
            "namespace": "default",
            "scheme": "xxh3-64-1337",
        },
        "change_busy_thresholds": {"model": "default", "active_decode_blocks_threshold": 0.9},
        "change_recording": {"recording": True},
        "potential_loads": _PROMPT,
        "overlap_scores": _PROMPT,
        "query": _PROMPT,
        "query_by_hash": {"block_hashes": [-4611686018427387904, 7], "model_name": "default"},
        "register": {"instance_id": 1, "endpoint": "nats", "model_name": "m", "block_size": 16},
        "unregister": {"instance_id": 1, "model_name": "m"},
        "register_peer": {"url": "http://10.0.0.9:8090"},
        "deregister_peer": {"url": "http://10.0.0.9:8090"},
    }
)
"""By handler name."""


ABOUT = """
Every refusal is JSON: `error`, a sentence; `code`, for programs; and fields of its own, such as
`field`, `reason` and `allowed`. If the process has a `token_file`, all routes except `/health`,
`/ready` and this page require `authorization: Bearer …`: 401 without a valid token, 403 for a
token without the scope, 429 for a token above its rate. Any request may be refused with 503
(`too_many_requests`), 431 or 408 (headers too large, or too slow). `x-request-id` and
`traceparent` are returned as received, or generated.
"""

_REASONS = {
    400: "the body is not JSON, or is contradictory",
    404: "no such worker, reservation or index",
    408: "the body did not arrive in time",
    409: "the id is in use, or the request conflicts with existing state",
    413: "the body is too large",
    415: "the body is not application/json",
    422: "a field is missing, or has the wrong type or range",
    429: "this tenant's share of the full queue is used up; see Retry-After",
    501: "not supported by this version",
    503: "no worker can take the request now",
    529: "all ranks are busy, and the queue is full or the wait timed out; see Retry-After",
}


def document(app: FastAPI, routes: Sequence[Route]) -> None:
    """Describe these routes in the application's OpenAPI document, once it is requested."""
    generate = app.openapi
    described = {(route.path, route.handler): route for route in routes}

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            for each in app.routes:
                if isinstance(each, APIRoute) and each.include_in_schema:
                    each.openapi_extra = extra(described[each.path, each.name])
            schemas = generate().setdefault("components", {}).setdefault("schemas", {})
            schemas.update(_components(routes))
        return generate()

    app.openapi = openapi  # type: ignore[method-assign]


def _components(routes: Sequence[Route]) -> dict[str, Any]:
    """Return the schemas of bodies and responses, by name."""
    types = [t for route in routes for t in (route.body, route.answer) if t is not None]
    named = [*types, ErrorResponse, ReservationStep]  # items of batches are named, not typed
    _, components = msgspec.json.schema_components(named, ref_template=_REF)
    describe(components, named)
    for name in ("PromptRequest", "PotentialLoadsRequest", "SelectRequest"):
        if name in components:
            components[name]["anyOf"] = _PROMPTS
    return components


def extra(route: Route) -> dict[str, Any]:
    """Return parameters, request body and responses of a route, as OpenAPI fields."""
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
    "texts verbatim, all other values as JSON",
}


_REF = "#/components/schemas/{name}"

_NUMBERS = ("worker_id", "sequence_hash")
"""Path parameters that are numbers."""

_PROMPTS = [
    {"required": ["token_ids"], "properties": {"token_ids": {"type": "array"}}},
    {
        "required": ["sequence_hashes", "isl_tokens"],
        "properties": {"sequence_hashes": {"type": "array"}, "isl_tokens": {"type": "integer"}},
    },
]
"""A prompt is given as tokens or as hashes."""


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


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h2 { font: 600 15px/1.5 ui-monospace, monospace; margin: 2rem 0 0.3rem }
pre { background: #8881; padding: 0.6rem; overflow-x: auto; white-space: pre-wrap }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0 1rem; margin: 0.3rem 0 }
dd { margin: 0 } dt { font-family: ui-monospace, monospace }
"""
_STYLE_HASH = b64encode(sha256(_STYLE.encode()).digest()).decode()

PAGE_HEADERS = {
    "content-security-policy": (
        f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


def docs_page(schema: Mapping[str, Any]) -> str:
    """Return the page of an OpenAPI document."""
    title, about = (escape(schema["info"][name]) for name in ("title", "description"))
    operations = "\n".join(
        _operation(path, method, each)
        for path, methods in schema["paths"].items()
        for method, each in methods.items()
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{title}</h1><p>{about}</p>"
        '<p>Schemas of all bodies: <a href="openapi.json">openapi.json</a>.</p>'
        f"{operations}</body></html>\n"
    )


def _operation(path: str, method: str, operation: Mapping[str, Any]) -> str:
    parameters = operation.get("parameters", ())
    parts = [
        f"<section><h2>{method.upper()} {escape(path)}</h2>",
        f"<p>{escape(operation.get('summary', ''))}</p>",
        _list((each["name"], each.get("description", "")) for each in parameters),
    ]
    content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    if "example" in content:
        parts.append(f"<pre>{escape(json.dumps(content['example']))}</pre>")
    answers = operation.get("responses", {}).items()
    parts.append(_list((status, each.get("description", "")) for status, each in answers))
    return "".join([*parts, "</section>"])


def _list(rows: Iterator[tuple[str, str]]) -> str:
    shown = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in rows)
    return f"<dl>{shown}</dl>" if shown else ""
