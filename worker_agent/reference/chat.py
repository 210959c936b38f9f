"""Chats of a byte-level model: the chat template, and the request bodies."""

from collections.abc import Sequence

from msgspec import Struct

from router.errors import InvalidFieldError
from worker_agent.reference.completions import CompletionRequest, KvTransferParams, StreamOptions

MAX_TOKENS = 128
"""The default limit of a response: the model has not learned when to end."""

_ANSWER = "<assistant>"


class TextPart(Struct, frozen=True):
    """A part of a message."""

    type: str
    text: str = ""


class Message(Struct, frozen=True):
    """A message of a chat."""

    role: str
    content: str | list[TextPart] | None = None

    @property
    def text(self) -> str:
        """The text of the message. Raises InvalidFieldError for other content."""
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        strangers = [part.type for part in self.content if part.type != "text"]
        if strangers:
            raise InvalidFieldError("messages", f"a part of type {strangers[0]!r}", "text")
        return "".join(part.text for part in self.content)


class _Chat(Struct, frozen=True, kw_only=True):
    """The options that determine the prompt of a chat."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False

    def rendered(self, messages: Sequence[Message]) -> str:
        """Return the prompt of a chat with these options. Raises InvalidFieldError."""
        continues = self.continue_final_message
        if continues and self.add_generation_prompt:
            reason = "with add_generation_prompt"
            raise InvalidFieldError("continue_final_message", reason, "one of the two")
        text = rendered(messages)
        if self.add_generation_prompt:
            return text
        return text[: -len(_ANSWER) - continues]


class ChatRequest(_Chat, frozen=True, kw_only=True):
    """A chat; the fields are those of `CompletionRequest`."""

    messages: list[Message]
    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float = 0.0
    seed: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    return_token_ids: bool = False
    kv_transfer_params: KvTransferParams | None = None
    n: int = 1
    stop: str | list[str] | None = None
    logprobs: bool | None = None

    @property
    def completion(self) -> CompletionRequest:
        """The equivalent completion. Raises InvalidFieldError."""
        if not self.messages:
            raise InvalidFieldError("messages", "empty", "at least one message")
        most = self.max_completion_tokens or self.max_tokens
        if self.temperature < 0 or self.temperature > 100:
            raise InvalidFieldError("temperature", str(self.temperature), "0 to 100")
        if most is not None and most < 1:
            raise InvalidFieldError("max_tokens", str(most), "at least 1")
        return CompletionRequest(
            prompt=self.rendered(self.messages),
            model=self.model,
            max_tokens=MAX_TOKENS if most is None else most,
            temperature=self.temperature,
            seed=self.seed,
            stream=self.stream,
            stream_options=self.stream_options,
            cache_salt=self.cache_salt,
            return_token_ids=self.return_token_ids,
            kv_transfer_params=self.kv_transfer_params,
            n=self.n,
            stop=self.stop,
            logprobs=1 if self.logprobs else None,
        )


class TokenizeRequest(_Chat, frozen=True, kw_only=True):
    """A request for the tokens of a text or a chat, as in vLLM's server."""

    prompt: str | None = None
    messages: list[Message] | None = None

    @property
    def tokens(self) -> list[int]:
        """The tokens for the model. Raises InvalidFieldError."""
        if self.messages:
            return list(self.rendered(self.messages).encode())
        if self.prompt is None:
            raise InvalidFieldError("prompt", "missing", "a text, or messages")
        return list(self.prompt.encode())


def rendered(messages: Sequence[Message]) -> str:
    """Return the prompt of a chat; a continued chat starts with it, except its last line."""
    joined = "".join(f"<{each.role}>{each.text}\n" for each in messages)
    return f"{joined}{_ANSWER}"
