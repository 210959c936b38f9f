"""Errors of a rank's publisher and its saved state; part of the tree in `router.errors`."""

from router.errors import KvRouterError


class NormalizerStateError(KvRouterError):
    """An unusable saved state of a normaliser: malformed, or of another version or identity."""

    code = "normalizer_state"

    def __init__(self, reason: str) -> None:
        super().__init__(f"unusable state of a normaliser: {reason}")
        self.reason = reason


class FeedStateError(KvRouterError):
    """A failure to use or write the file with an agent's saved state of its engine."""

    code = "feed_state"

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


class TooManyQueriesError(KvRouterError):
    """The rejection of a query about a rank's events, because too many are waiting."""

    code = "busy"
    http_status = 503

    def __init__(self, limit: int) -> None:
        super().__init__(f"queries: the limit is reached (allowed: at most {limit} waiting ones)")
        self.limit = limit
