"""What the router is asked for a request: by its prompt's tokens, and what else it says."""

import re
from collections.abc import Collection, Sequence
from typing import Any
from uuid import uuid4

from msgspec import Struct, structs

from router.forward.bodies import Asked
from router.forward.direct import demanded_worker, named_prefill_worker, named_worker
from router.forward.headers import DYNAMO_SESSION_ID, SESSION_ID, Pairs, header
from router.forward.words import Words
from router.protocol.requests import SelectRequest
from router.security.caller import Caller

CHARACTERS_A_TOKEN = 4
"""Of English text, about; where nobody can count."""

TOKENS_AN_IMAGE = 1024
"""And of what comes as `data:` in a message, however many bytes it has."""

_DATA_URL = re.compile(rb'"data:[^"]*"')


class PromptTokens(Struct, frozen=True):
    """A prompt's tokens. Not `are_certain`: no cache is searched for them. `are_counted`: engines
    should count as many.
    """

    token_ids: Sequence[int]
    are_certain: bool = True
    are_counted: bool = False


def guessed(asked: Asked) -> PromptTokens:
    """A prompt that nobody can read: so many tokens, whichever they are."""
    if isinstance(asked.prompt, str):
        tokens = len(asked.prompt) // CHARACTERS_A_TOKEN
    else:
        text, data_urls = _DATA_URL.subn(b"", bytes(asked.read.messages))
        tokens = len(text) // CHARACTERS_A_TOKEN + data_urls * TOKENS_AN_IMAGE
    return PromptTokens([0] * max(1, tokens), are_certain=False)


class Placing(Struct, frozen=True):
    """How requests of this process are placed."""

    routing_group: str
    is_direct: bool
    max_wait_s: float

    def request_in(
        self,
        words: Words | None,
        asked: Asked,
        headers: Pairs,
        caller: Caller,
        tokens: PromptTokens,
    ) -> SelectRequest:
        """What to ask, of words that may have come before under this head. Raises as `request`."""
        if words is None or not tokens.are_certain:
            return self.request(asked, headers, caller, tokens)
        known = words.request_of(caller, tokens.token_ids)
        if known is not None:
            return known
        request = self.request(asked, headers, caller, tokens)
        words.note_request(caller, request)
        return request

    def request(
        self, asked: Asked, headers: Pairs, caller: Caller, tokens: PromptTokens
    ) -> SelectRequest:
        """What to ask. Raises InvalidFieldError, ForbiddenError."""
        hints = asked.extensions.agent_hints
        session_id = header(headers, SESSION_ID) or header(headers, DYNAMO_SESSION_ID)
        target = (demanded_worker if self.is_direct else named_worker)(asked, headers)
        token_ids: Any = tokens.token_ids  # which clients of routers take in any form
        request = SelectRequest(
            token_ids=token_ids,
            model_name=asked.model,
            routing_group=self.routing_group,
            cache_salt=asked.read.cache_salt,
            session_id=caller.own_id("session_id", session_id) if session_id else None,
            tenant=caller.tenant,
            expected_output_tokens=hints.osl,
            priority_jump=hints.latency_sensitivity,
            pinned_worker=target,
            prefill_worker_id=named_prefill_worker(asked, headers),
            max_wait_s=self.max_wait_s,
        )
        request = caller.bound(request)
        if not tokens.are_certain:  # under a salt of nobody's, no block is held by anybody
            request = structs.replace(request, cache_salt=uuid4().hex)
        return request


def elsewhere(request: SelectRequest, worker_ids: Collection[int]) -> SelectRequest:
    """The same, anywhere but there."""
    return structs.replace(request, excluded_worker_ids=sorted(worker_ids) or None)
