"""Errors of blocks that workers share."""

from router.errors import KvRouterError


class BlocksetError(KvRouterError):
    """Blocks of another worker that are unavailable in this way. `rule`: the broken rule."""

    code = "blockset"
    http_status = 409

    def __init__(self, field: str, reason: str, allowed: str, *, rule: str) -> None:
        super().__init__(f"{field}: {reason} (allowed: {allowed})")
        self.field = field
        self.rule = rule


class PeerError(KvRouterError):
    """A connection to another worker that cannot be used; transfers in flight on it failed."""

    code = "peer"
    http_status = 503

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(f"{address}: {reason}")
        self.address = address
        self.reason = reason
