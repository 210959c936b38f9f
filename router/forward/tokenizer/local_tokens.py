"""Tokenization by local tokenizers, for prompts on which engines agree with them."""

import asyncio
from collections.abc import Sequence

from msgspec import Raw

from router.forward.apis.api import CHAT, COMPLETIONS
from router.forward.request_body import CompletionRequest
from router.forward.resilience.model_names import ModelNames
from router.forward.tokenizer.chats import KINDS
from router.forward.tokenizer.errors import NotLocalError
from router.forward.tokenizer.tokenizers import Tokenizers
from router.forward.tokenizer.verification import Checks

IN_THREAD_BYTES = 8 * 1024
"""Size of a prompt from which a thread tokenizes it, so that other requests are served."""


class LocalTokens:
    """The local tokenizers of all models."""

    def __init__(self, tokenizers: Tokenizers, checks: Checks, names: ModelNames) -> None:
        self._names = names
        self._tokenizers = tokenizers
        self._checks = checks

    def described(self) -> dict[str, object]:
        """Return their state by model and kind of prompt, and the differences."""
        models = sorted({model for model, _, _ in self._checks.counts()})
        standing = {
            model: {kind: self._checks.standing(model, kind) for kind in KINDS} for model in models
        }
        return {"standing": standing, "problems": self._checks.problems()}

    async def tokens(self, asked: CompletionRequest, partition: bytes) -> Sequence[int]:
        """Return the tokens of a prompt. Raises NotLocalError, PromptRefusedError."""
        model = self._names.base(asked.model)
        tokenizer = self._tokenizers.of(model)
        if tokenizer is None:
            raise NotLocalError("no tokenizer")
        if asked.path not in (COMPLETIONS, CHAT):
            raise NotLocalError("no text and no chat")
        believed = self._checks.believed(model)
        if _size_bytes(asked) < IN_THREAD_BYTES:
            return tokenizer.packed(asked, believed, partition)[1]
        return (await asyncio.to_thread(tokenizer.packed, asked, believed, partition))[1]


def _size_bytes(asked: CompletionRequest) -> int:
    """Return the size of the fields to read; a text counts characters, not bytes."""
    if isinstance(asked.prompt, str):
        return len(asked.prompt)
    return sum(memoryview(asked.fields.get(n, Raw())).nbytes for n in ("messages", "tools"))
