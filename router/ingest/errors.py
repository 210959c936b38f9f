"""Errors of other indexers and of persisted state."""

from router.errors import KvRouterError


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


class DataDirError(KvRouterError):
    """A file of persisted state cannot be read or written."""

    code = "data_dir"

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason
