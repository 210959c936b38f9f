"""What the index alone refuses; part of the tree in `errors`.

    KvRouterError
    ├── NoIndexerError, InstanceNotFoundError, PeerNotFoundError            there is none
    ├── AlreadyRegisteredError, AnnouncedInstanceError, OtherScopeError     somebody else has the id
    ├── BlockSizeMismatchError
    ├── TooManyPeersError                                                   a limit is reached
    ├── AnswerTooLargeError         for the bus
    ├── SaltedHashesError           hashes are asked about, and a salt that they already contain
    └── UnsupportedFieldError       a feature of the peer's that this version lacks

The sentences that Dynamo's indexer says too are its own, word for word.
"""

from router.errors import KvRouterError
from router.protocol.values import Scope


class NoIndexerError(KvRouterError):
    """No worker of this scope is registered or announced."""

    code = "no_indexer"
    http_status = 404

    def __init__(self, scope: Scope) -> None:
        super().__init__(f"no indexer for {_place(scope)}")
        self.model_name = scope.model_name
        self.routing_group = scope.routing_group


class InstanceNotFoundError(KvRouterError):
    """No such instance, or no such rank of it, in the place asked about."""

    code = "instance_not_found"
    http_status = 404

    def __init__(self, instance_id: int, detail: str = "") -> None:
        super().__init__(f"instance {instance_id}{detail and ' ' + detail} not found")
        self.instance_id = instance_id


class AlreadyRegisteredError(KvRouterError):
    """The rank is known already, from a registration or from the bus."""

    code = "already_registered"
    http_status = 409

    def __init__(self, instance_id: int, dp_rank: int) -> None:
        super().__init__(f"instance {instance_id} dp_rank {dp_rank} already registered")
        self.instance_id = instance_id
        self.dp_rank = dp_rank


class AnnouncedInstanceError(KvRouterError):
    """The instance comes and goes with its announcement on the bus, which is not ours to change."""

    code = "instance_announced"
    http_status = 409

    def __init__(self, instance_id: int) -> None:
        super().__init__(
            f"instance_id: {instance_id} is announced on the bus, and comes and goes with that "
            "(allowed: an instance that was registered here)"
        )
        self.instance_id = instance_id


class OtherScopeError(KvRouterError):
    """The instance is registered for another model or routing group."""

    code = "other_scope"
    http_status = 409

    def __init__(self, instance_id: int, scope: Scope) -> None:
        super().__init__(
            f"instance_id: {instance_id} is registered for {_place(scope)} "
            "(allowed: further ranks of the same)"
        )
        self.instance_id = instance_id


class BlockSizeMismatchError(KvRouterError):
    """The scope's other workers count in blocks of another size."""

    code = "block_size_mismatch"
    http_status = 409

    def __init__(self, scope: Scope, existing: int, requested: int) -> None:
        super().__init__(
            f"block_size mismatch for {_place(scope)}: existing={existing}, requested={requested}"
        )
        self.existing = existing
        self.requested = requested


class PeerNotFoundError(KvRouterError):
    """This peer is not in the list."""

    code = "peer_not_found"
    http_status = 404

    def __init__(self, url: str) -> None:
        super().__init__(f"peer {url} not found")
        self.url = url


class TooManyPeersError(KvRouterError):
    """The list of peers is full."""

    code = "too_many_peers"
    http_status = 503

    def __init__(self, limit: int) -> None:
        super().__init__(f"peers: the limit is reached (allowed: at most {limit})")
        self.limit = limit


class SaltedHashesError(KvRouterError):
    """A salt beside hashes: they were made with one, or they are not the ones meant."""

    code = "cache_salt_not_accepted"
    http_status = 400

    def __init__(self, where: str) -> None:
        super().__init__(
            f"cache_salt is not accepted by {where}; "
            "block_hashes must already include the intended cache salt"
        )
        self.field = "cache_salt"


class AnswerTooLargeError(KvRouterError):
    """The answer is larger than a message on the bus may be."""

    code = "answer_too_large"
    http_status = 503

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(
            f"answer: larger than a message (allowed: at most {limit_bytes} bytes; over HTTP, as "
            "with GET /dump, there is no limit)"
        )
        self.limit_bytes = limit_bytes


class UnsupportedFieldError(KvRouterError):
    """The peer can do this, this version can not."""

    code = "unsupported"
    http_status = 501

    def __init__(self, field: str, reason: str, allowed: str) -> None:
        super().__init__(f"{field}: {reason} (allowed: {allowed})")
        self.field = field
        self.reason = reason
        self.allowed = allowed


def _place(scope: Scope) -> str:
    return f"model={scope.model_name} routing_group={scope.routing_group}"
