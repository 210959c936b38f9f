"""What goes wrong between a prompt in words and its tokens.

KvRouterError
├── InvalidFieldError
│   └── PromptRefusedError       no engine could make anything of it; said as OpenAI says it
├── NotLocalError                its tokens are for the engine to say; nothing is wrong with it
└── ConfigError
    └── TokenizerFilesError      a tokenizer that cannot be used
"""

from router.errors import ConfigError, InvalidFieldError, KvRouterError


class PromptRefusedError(InvalidFieldError):
    """What was sent is no prompt. `field`: where, as a path."""

    code = "invalid_prompt"

    def __init__(self, field: str, said: str) -> None:
        super().__init__(field, said, "see OpenAI's reference")
        self.args = (said,)


class NotLocalError(KvRouterError):
    """Only an engine knows these tokens. `reason`: what the prompt has that is not known here."""

    code = "not_local"
    http_status = 422

    def __init__(self, reason: str) -> None:
        super().__init__(f"left to the engine: {reason}")
        self.reason = reason


class TokenizerFilesError(ConfigError):
    """A tokenizer that cannot be used. `path`: of the file that is at fault."""

    def __init__(self, path: str, reason: str, allowed: str) -> None:
        super().__init__("tokenizer", f"{path}: {reason}", allowed)
        self.path = path
