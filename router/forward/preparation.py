"""The road of a request to its placement, whichever door it came through.

body ─▶ read_request ─▶ permitted ─▶ RequestPlacement.request_in ─▶ Preparation.prepared ─▶ placed
"""

import asyncio
from collections.abc import Sequence

from msgspec import Struct

from router.forward.apis.media_names import with_own_names
from router.forward.apis.passed import PASSED
from router.forward.headers import Pairs, client_key
from router.forward.passing import BodySizes
from router.forward.placement import PromptTokens, RequestPlacement, partition_of, with_tokens
from router.forward.prefill.remote_prefill import PrefillRequest
from router.forward.request_body import (
    CompletionRequest,
    read_completion_request,
    read_passed_request,
)
from router.forward.request_templates import RequestTemplate, read
from router.forward.tokenizer.referee import RefereeKey
from router.forward.tokenizer.tokenization import Tokenization
from router.protocol.requests import SelectRequest
from router.runtime.process.json_bodies import THREAD_BYTES


class PreparedRequest(Struct, frozen=True, eq=False):
    """A request that can be placed. `request`: to the router, with the prompt's tokens."""

    asked: CompletionRequest
    request: SelectRequest
    tokens: PromptTokens


class ForwardRequest(PrefillRequest, frozen=True, eq=False):
    """A request to forward, and its router request.

    `counted_tokens`: the number of tokens that engines should count in its prompt, if known.
    `prompt`: its tokens, if known. `words`: its cached request template, for a single prompt.
    `confirms`: see `PromptTokens`. `method`, `target`: what the engine is asked; by default the API
    of the request.
    """

    counted_tokens: int | None = None
    prompt: Sequence[int] | None = None
    words: RequestTemplate | None = None
    confirms: RefereeKey | None = None
    method: str = "POST"
    target: str = ""

    @property
    def is_guess(self) -> bool:
        """True if the router received another prompt than engines compute.

        That is so for a prompt that could not be tokenized, and for several prompts.
        """
        is_read = self.counted_tokens is not None or self.prompt is not None
        return not is_read or self.asked.has_several_prompts


async def read_request(
    path: str, body: bytes, content_type: bytes, known: list[RequestTemplate] | None
) -> tuple[CompletionRequest, RequestTemplate | None]:
    """Parse a body. Returns also its cached template, or None. Raises what the parsers raise.

    A long body is parsed on another thread, so that other requests are served meanwhile. `known`:
    the templates of its request head; None to learn none.
    """
    is_long = len(body) > THREAD_BYTES
    if path in PASSED:
        if is_long:
            return await asyncio.to_thread(read_passed_request, path, body, content_type), None
        return read_passed_request(path, body, content_type), None
    if is_long:
        return await asyncio.to_thread(read_completion_request, path, body), None
    return read(path, body, known)


class Preparation:
    """Finds a prompt's tokens, and puts them into the request to the router.

    `placing`: builds that request before, so that its caller is authorized before any tokens are
    made. `sizes`: learned sizes of requests that pass byte for byte.
    """

    __slots__ = ("placing", "sizes", "tokenizing")

    def __init__(self, placing: RequestPlacement, tokenizing: Tokenization) -> None:
        self.placing = placing
        self.tokenizing = tokenizing
        self.sizes = BodySizes()

    async def prepared(
        self, asked: CompletionRequest, request: SelectRequest, headers: Pairs, tenant: str | None
    ) -> PreparedRequest:
        """Return a request with its tokens, and with a tenant's own names for its images.

        Raises PromptRefusedError.
        """
        asked = await _with_own_names(asked, tenant)
        if asked.path in PASSED:
            tokens = self.sizes.estimated(asked)
        else:
            partition, key = partition_of(request), client_key(headers)
            tokens = await self.tokenizing.tokens(asked, partition, key)
        return PreparedRequest(asked, with_tokens(request, tokens), tokens)


async def _with_own_names(asked: CompletionRequest, tenant: str | None) -> CompletionRequest:
    """Return a tenant's request with names of its own for its images."""
    if tenant is not None and asked.size_bytes > THREAD_BYTES:
        return await asyncio.to_thread(with_own_names, asked, tenant)
    return with_own_names(asked, tenant)
