"""Hashing of prompts ahead of the core; long prompts are hashed on another thread."""

import asyncio
from collections.abc import Iterable

from router.protocol.requests import PromptRequest
from router.protocol.values import Identity
from router.sequence.active.prompt import Prompt, prepare
from router.sequence.active.stages import Stages
from router.sequence.hashing.keyed_hashes import PLAIN, HashKeying

THREAD_TOKENS = 131_072
"""Prompt length in tokens above which a prompt is hashed on another thread.

Short prompts are then not delayed by long ones. The change of threads takes as long as hashing
this number of tokens: a tenth of a millisecond.
"""


def is_short(request: PromptRequest) -> bool:
    """Return whether a prompt is short enough to be hashed on the event loop."""
    return request.token_ids is None or len(request.token_ids) <= THREAD_TOKENS


async def prepared(
    request: PromptRequest,
    identities: Iterable[Identity],
    stages: Stages | None = None,
    naming: HashKeying = PLAIN,
) -> Prompt:
    """Return a prompt, hashed under these identities. Raises what `prepare` raises."""
    if is_short(request):
        return prepare(request, identities, stages, naming)
    prompt = await asyncio.to_thread(prepare, request, identities, stages, naming)
    if stages is not None:
        stages.resume()
    return prompt
