"""Errors of other indexers, of other routers, and of persisted state."""

from router.errors import ConfigError, KvRouterError


class PeerNotFoundError(KvRouterError):
    """A peer that is not in the list."""

    code = "peer_not_found"
    http_status = 404

    def __init__(self, url: str) -> None:
        super().__init__(f"peer {url} not found")
        self.url = url


class TooManyPeersError(KvRouterError):
    """A peer beyond the limit of the list."""

    code = "too_many_peers"
    http_status = 503

    def __init__(self, limit: int) -> None:
        super().__init__(f"peers: the limit is reached (allowed: at most {limit})")
        self.limit = limit


class PeerConflictError(ConfigError):
    """A router whose settings contradict this one's, so that they cannot share reservations."""

    code = "peer_conflict"
    http_status = 409


class PeerItselfError(KvRouterError):
    """A stream that a router requested of itself."""

    code = "peer_itself"
    http_status = 409

    def __init__(self) -> None:
        super().__init__("this address is the router's own")


class DataDirError(KvRouterError):
    """A file of persisted state cannot be read or written."""

    code = "data_dir"

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason
