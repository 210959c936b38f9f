"""The router request of a completion request, and the worker that the request names.

The fields are `nvext.backend_instance_id`, and `nvext.decode_worker_id` in disaggregated serving,
where the decode worker sends the response.
"""

import re
from collections.abc import Collection, Sequence
from uuid import uuid4

import msgspec
from msgspec import Struct, structs

from router.api.request_headers import OBJECTIVE_HEADERS, objectives_in
from router.client.bodies import as_json
from router.client.calls import received_fields
from router.errors import InvalidFieldError
from router.forward.errors import NoWorkerNamedError
from router.forward.headers import (
    DP_RANK,
    PREFILL_INSTANCE_ID,
    WORKER_ID,
    WORKER_INSTANCE_ID,
    Pairs,
    header,
)
from router.forward.request_body import CompletionRequest
from router.forward.request_templates import RequestTemplate
from router.forward.resilience.model_names import ModelNames
from router.forward.sessions import SeenIds, session_keys
from router.protocol.requests import BlockMmInfo, RankTarget, SelectRequest
from router.protocol.values import U64_MAX, number_in
from router.runtime.process.json_bodies import decode_now
from router.runtime.security.caller import Caller


def named_worker(asked: CompletionRequest, headers: Pairs) -> RankTarget | None:
    """Return the named worker or rank, or None; headers precede the body.

    Raises InvalidFieldError.
    """
    worker_id = _number(headers, WORKER_ID)
    if worker_id is None:
        worker_id = _number(headers, WORKER_INSTANCE_ID)
    extensions = asked.extensions
    if worker_id is None:
        worker_id = extensions.backend_instance_id
    if worker_id is None:
        worker_id = extensions.decode_worker_id
    return None if worker_id is None else RankTarget(worker_id, _number(headers, DP_RANK))


def demanded_worker(asked: CompletionRequest, headers: Pairs) -> RankTarget:
    """Return the named worker or rank. Raises NoWorkerNamedError if there is none."""
    target = named_worker(asked, headers)
    if target is None:
        raise NoWorkerNamedError
    return target


def named_prefill_worker(asked: CompletionRequest, headers: Pairs) -> int | None:
    """Return the named prefill worker, which has computed the prompt, or None."""
    worker_id = _number(headers, PREFILL_INSTANCE_ID)
    return asked.extensions.prefill_worker_id if worker_id is None else worker_id


def _number(headers: Pairs, name: bytes) -> int | None:
    value = header(headers, name)
    if value is None:
        return None
    number = number_in(value, U64_MAX)
    if number is None:
        raise InvalidFieldError(name.decode(), repr(value[:64]), f"0 to {U64_MAX}")
    return number


CHARACTERS_A_TOKEN = 4
"""Approximate characters per token of English text, for estimates."""

TOKENS_AN_IMAGE = 1024
"""Estimated tokens of a file in a message, whatever its size."""

_FILE = re.compile(rb'"data:[^"]*"|"data"\s*:\s*"[A-Za-z0-9+/=_-]{64,}"')
"""A file in a message: as a URL, or in Anthropic's format."""

_read = msgspec.json.Decoder(SelectRequest).decode


class PromptTokens(Struct, frozen=True):
    """A prompt's tokens.

    If not `are_certain`, the cache is not searched. `are_counted`: engines should count the same
    number of tokens. `block_mm_infos`: the images of each block. `confirms`: model, path and
    features of which an engine's count is a confirmation.
    """

    token_ids: Sequence[int]
    are_certain: bool = True
    are_counted: bool = False
    block_mm_infos: list[BlockMmInfo | None] | None = None
    confirms: tuple[str, str, frozenset[str]] | None = None


def estimated(asked: CompletionRequest) -> PromptTokens:
    """Return an estimate for a prompt that cannot be tokenized: a number of arbitrary tokens."""
    if isinstance(asked.prompt, str):
        tokens = len(asked.prompt) // CHARACTERS_A_TOKEN
    elif not asked.api.computes:
        tokens = 0
    else:
        written = [bytes(asked.fields.get(name, b"")) for name in asked.api.prompt_fields]
        text, files = _FILE.subn(b"", b"".join(written))
        tokens = len(text) // CHARACTERS_A_TOKEN + files * TOKENS_AN_IMAGE
    return PromptTokens([0] * max(1, tokens), are_certain=False)


class RequestPlacement(Struct, frozen=True):
    """Builds router requests of this process.

    `seen`: ids that may turn out to be sessions. `names`: of models.
    """

    routing_group: str
    is_direct: bool
    max_wait_s: float
    seen: SeenIds
    names: ModelNames

    def request_in(
        self,
        words: RequestTemplate | None,
        asked: CompletionRequest,
        headers: Pairs,
        caller: Caller,
    ) -> SelectRequest:
        """Return the router request without tokens, cached by request template.

        Raises the errors of `request`.
        """
        known = None if words is None else words.request_of(caller)
        if known is not None:
            return self.names.resolved(known)
        request = self.request(asked, headers, caller)
        if words is not None:
            words.note_request(caller, request)  # names change: they are resolved each time
        return self.names.resolved(request)

    def request(self, asked: CompletionRequest, headers: Pairs, caller: Caller) -> SelectRequest:
        """Return the router request without tokens: the caller is authorized before any are made.

        Raises InvalidFieldError, ForbiddenError.
        """
        hints, objectives = asked.extensions.agent_hints, _objectives(asked, headers)
        keys = session_keys(headers, asked.fields, caller.tenant, self.seen)
        named = keys.name and caller.own_id("session_id", keys.name)
        target = (demanded_worker if self.is_direct else named_worker)(asked, headers)
        request = SelectRequest(
            token_ids=(),  # type: ignore[arg-type]
            model_name=asked.model,
            routing_group=self.routing_group,
            cache_salt=asked.read.cache_salt,
            session_id=named or keys.hint,
            session_is_hint=not named and keys.hint is not None,
            session_is_final=keys.is_final,
            tenant=caller.tenant,
            fair_share_id=keys.fair_share_id,
            expected_output_tokens=1 if asked.api.passes else hints.osl,
            priority_jump=hints.latency_sensitivity,
            pinned_worker=target,
            prefill_worker_id=named_prefill_worker(asked, headers),
            max_wait_s=self.max_wait_s,
            slo_ttft_ms=objectives.get("slo_ttft_ms"),
            slo_tpot_ms=objectives.get("slo_tpot_ms"),
            slo_unmet=asked.extensions.slo_unmet,
        )
        return caller.bound(_checked(request))


def _objectives(asked: CompletionRequest, headers: Pairs) -> dict[str, float]:
    """Return the objectives of a request by field; the body precedes headers.

    Raises InvalidFieldError.
    """
    given = dict(reversed(headers))
    named = {name: given[key].decode("latin-1") for key, name in _OBJECTIVES if key in given}
    found = objectives_in(named) if named else {}
    own = ((name, getattr(asked.extensions, name)) for name in OBJECTIVE_HEADERS)
    return found | {name: value for name, value in own if value is not None}


_OBJECTIVES = tuple((name.encode(), name) for names in OBJECTIVE_HEADERS.values() for name in names)


def _checked(request: SelectRequest) -> SelectRequest:
    """Return a request that a router reads alike. Raises InvalidFieldError.

    Its fields contain what callers sent.
    """
    return decode_now(_read, as_json(received_fields(request)))


def with_tokens(request: SelectRequest, tokens: PromptTokens) -> SelectRequest:
    """Return the router request of a prompt; no block is cached under a unique salt."""
    request = request.__copy__()  # type: ignore[attr-defined]
    structs.force_setattr(request, "token_ids", tokens.token_ids)
    if tokens.block_mm_infos is not None:
        structs.force_setattr(request, "block_mm_infos", tokens.block_mm_infos)
    if not tokens.are_certain:
        structs.force_setattr(request, "cache_salt", uuid4().hex)
    return request


def partition_of(request: SelectRequest) -> bytes:
    """Return the part of the token caches that a request may use: its tenant's and its salt's.

    A prompt that is cached answers sooner, so no tenant may meet what another has sent.
    """
    if request.tenant is None and request.cache_salt is None:
        return b""
    return msgspec.msgpack.encode((request.tenant, request.cache_salt))


def again(request: SelectRequest) -> SelectRequest:
    """Return the request for a further attempt: it was admitted, and is not refused any more."""
    has_objectives = request.slo_unmet != "place"
    return structs.replace(request, slo_unmet="place") if has_objectives else request


def elsewhere(request: SelectRequest, worker_ids: Collection[int]) -> SelectRequest:
    """Return the request with these workers excluded, beside those that it excludes itself."""
    excluded = {*worker_ids, *(request.excluded_worker_ids or ())}
    return structs.replace(request, excluded_worker_ids=sorted(excluded) or None)
