"""What a rank's publisher refuses, and kept state that it cannot use; part of the tree in
`router.errors`.
"""

from router.errors import KvRouterError


class NormalizerStateError(KvRouterError):
    """What should be the kept state of a normaliser is none, or not of this version or identity."""

    code = "normalizer_state"

    def __init__(self, reason: str) -> None:
        super().__init__(f"unusable state of a normaliser: {reason}")
        self.reason = reason


class FeedStateError(KvRouterError):
    """The file in which an agent keeps what it knows of its engine cannot be used, or written."""

    code = "feed_state"

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


class TooManyQueriesError(KvRouterError):
    """As many queries about a rank's events wait as may."""

    code = "busy"
    http_status = 503

    def __init__(self, limit: int) -> None:
        super().__init__(f"queries: the limit is reached (allowed: at most {limit} waiting ones)")
        self.limit = limit
