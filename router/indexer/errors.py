"""Errors of the index."""

from router.errors import KvRouterError


class IndexDisabledError(KvRouterError):
    """A request for the contents of an index that the configuration disables.

    409 rather than 503: the router works, and a retry will not help.
    """

    code = "index_disabled"
    http_status = 409

    def __init__(self) -> None:
        super().__init__("no index is kept: overlap_score_weight is 0 (allowed: above 0, at start)")
        self.setting = "overlap_score_weight"
