"""Prompts are hashed before the core sees them; long ones on another thread."""

import asyncio
from collections.abc import Iterable

from router.protocol.requests import PromptRequest
from router.protocol.values import Identity
from router.sequence.naming import PLAIN, BlockNaming
from router.sequence.prompt import Prompt, prepare
from router.sequence.stages import Stages

THREAD_TOKENS = 131_072
"""Longer prompts are hashed on another thread, so that they do not hold up short ones. To go there
and back takes as long as to hash as many as these: a tenth of a millisecond.
"""


def is_short(request: PromptRequest) -> bool:
    """Whether `prepare` may be called for it here and now."""
    return request.token_ids is None or len(request.token_ids) <= THREAD_TOKENS


async def prepared(
    request: PromptRequest,
    identities: Iterable[Identity],
    stages: Stages | None = None,
    naming: BlockNaming = PLAIN,
) -> Prompt:
    """A prompt, hashed under these identities. Raises what `prepare` raises."""
    if is_short(request):
        return prepare(request, identities, stages, naming)
    prompt = await asyncio.to_thread(prepare, request, identities, stages, naming)
    if stages is not None:
        stages.resume()
    return prompt
