"""Tokens of prompts by tokenizers of our own, where engines agree with them."""

import asyncio

from msgspec import Raw

from router.forward.bodies import Asked
from router.forward.tokenizer.chats import KINDS
from router.forward.tokenizer.checks import Checks
from router.forward.tokenizer.errors import NotLocalError
from router.forward.tokenizer.tokenizers import Tokenizers

IN_THREAD_BYTES = 8 * 1024
"""Of a prompt; from there on, a thread makes its tokens, and others are served meanwhile."""


class LocalTokens:
    """Of all models."""

    def __init__(self, tokenizers: Tokenizers, checks: Checks) -> None:
        self._tokenizers = tokenizers
        self._checks = checks

    @property
    def is_there(self) -> bool:
        """Whether there is any tokenizer."""
        return bool(self._tokenizers)

    def told(self) -> dict[str, object]:
        """How they stand: by model of the workers, and kind of prompt; and what differs."""
        models = sorted({model for model, _, _ in self._checks.counts()})
        standing = {
            model: {kind: self._checks.standing(model, kind) for kind in KINDS} for model in models
        }
        return {"standing": standing, "problems": self._checks.problems()}

    async def tokens(self, asked: Asked) -> list[int]:
        """Of a prompt. Raises NotLocalError, PromptRefusedError."""
        tokenizer = self._tokenizers.of(asked.model)
        if tokenizer is None:
            raise NotLocalError("no tokenizer")
        believed = self._checks.believed(asked.model)
        if _size_bytes(asked) < IN_THREAD_BYTES:
            return tokenizer.tokens(asked, believed)[1]
        return (await asyncio.to_thread(tokenizer.tokens, asked, believed))[1]


def _size_bytes(asked: Asked) -> int:
    """Of what is to be read; a text may have more bytes than it has characters."""
    if isinstance(asked.prompt, str):
        return len(asked.prompt)
    return sum(memoryview(asked.fields.get(n, Raw())).nbytes for n in ("messages", "tools"))
