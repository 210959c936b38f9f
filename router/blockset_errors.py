"""What is refused of blocks that workers share; part of the tree in `errors`.

KvRouterError
├── BlocksetError                an export, a list of blocks, or a lease that does not hold
└── PeerError                    a worker that was to give or take blocks did not answer as agreed
"""

from router.errors import KvRouterError


class BlocksetError(KvRouterError):
    """Blocks of another worker cannot be had, or not like this. `rule`: which was broken."""

    code = "blockset"
    http_status = 409

    def __init__(self, field: str, reason: str, allowed: str, *, rule: str) -> None:
        super().__init__(f"{field}: {reason} (allowed: {allowed})")
        self.field = field
        self.rule = rule


class PeerError(KvRouterError):
    """The connection to another worker cannot be used; what was under way on it failed."""

    code = "peer"
    http_status = 503

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(f"{address}: {reason}")
        self.address = address
        self.reason = reason
