"""Prompts are hashed before the core sees them; long ones on another thread."""

import asyncio
from collections.abc import Iterable

from router.protocol.requests import PromptRequest
from router.protocol.values import Identity
from router.sequence.prompt import Prompt, prepare
from router.sequence.stages import Stages

THREAD_TOKENS = 16_384
"""Longer prompts are hashed on another thread, so that they do not hold up short ones."""


async def prepared(
    request: PromptRequest, identities: Iterable[Identity], stages: Stages | None = None
) -> Prompt:
    """A prompt, hashed under these identities. Raises what `prepare` raises."""
    tokens = 0 if request.token_ids is None else len(request.token_ids)
    if tokens <= THREAD_TOKENS:
        return prepare(request, identities, stages)
    prompt = await asyncio.to_thread(prepare, request, identities, stages)
    if stages is not None:
        stages.resume()
    return prompt
