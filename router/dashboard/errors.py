"""Errors of the dashboard's routes."""

from router.errors import KvRouterError


class TooManyStreamsError(KvRouterError):
    """More viewers than the limit allows."""

    code = "too_many_streams"
    http_status = 503
    retry_after_s = 10.0

    def __init__(self, most: int) -> None:
        super().__init__(f"dashboard: too many viewers (allowed: {most}, max_dashboard_streams)")
        self.most = most


class NoTokenizerError(KvRouterError):
    """No engine of the model could tokenize the text."""

    code = "no_tokenizer"
    http_status = 422

    def __init__(self, model_name: str, reason: str) -> None:
        super().__init__(
            f"text: no engine of model {model_name} tokenized it: {reason} (allowed: token_ids)"
        )
        self.model_name = model_name
        self.reason = reason
