"""Errors between a text prompt and its tokens.

KvRouterError
├── InvalidFieldError
│   └── PromptRefusedError       every engine would refuse the prompt; in OpenAI's words
├── NotLocalError                only an engine can tokenize it; the prompt is valid
└── ConfigError
    └── TokenizerFilesError      a tokenizer that cannot be used
"""

from router.errors import ConfigError, InvalidFieldError, KvRouterError


class PromptRefusedError(InvalidFieldError):
    """The prompt is invalid. `field`: the path of the invalid field."""

    code = "invalid_prompt"

    def __init__(self, field: str, message: str) -> None:
        super().__init__(field, message, "see OpenAI's reference")
        self.args = (message,)


class NotLocalError(KvRouterError):
    """Only an engine can tokenize this prompt. `reason`: the feature that is not supported here."""

    code = "not_local"
    http_status = 422

    def __init__(self, reason: str) -> None:
        super().__init__(f"left to the engine: {reason}")
        self.reason = reason


class TokenizerFilesError(ConfigError):
    """A tokenizer that cannot be used. `path`: the path of the faulty file."""

    def __init__(self, path: str, reason: str, allowed: str) -> None:
        super().__init__("tokenizer", f"{path}: {reason}", allowed)
        self.path = path
