"""Errors of callers' commands, and of the standalone index.

Messages that Dynamo's indexer has too are its own, word for word.
"""

from router.errors import KvRouterError
from router.protocol.values import Scope


class SelectionNotFoundError(KvRouterError):
    """An id without a selection: never made, expired, or reserved already."""

    code = "selection_not_found"
    http_status = 404

    def __init__(self, selection_id: str, model_name: str, routing_group: str) -> None:
        where = f"model={model_name} routing_group={routing_group}"
        why = "(expired, already used, or never selected)"
        super().__init__(f"no pending selection {selection_id} for {where} {why}")
        self.selection_id = selection_id
        self.model_name = model_name
        self.routing_group = routing_group


class DeadlineExceededError(KvRouterError):
    """A response too late for its caller; nothing is booked."""

    code = "deadline_exceeded"
    http_status = 504

    def __init__(self, timeout_s: float) -> None:
        super().__init__(f"no response within the {timeout_s:g} s that the caller waits")
        self.timeout_s = timeout_s


class ShadowOffError(KvRouterError):
    """A request for a comparison with another router's choices, where none are compared.

    409 rather than 404: the route exists, and a retry will not help.
    """

    code = "shadow_off"
    http_status = 409

    def __init__(self) -> None:
        super().__init__(
            "nothing is compared: this router decides (allowed: with --shadow or --shadow-policy)"
        )
        self.setting = "shadow"


class NoReplicaPeersError(KvRouterError):
    """A request to name a peer router: routers are named by settings, or find each other."""

    code = "no_replica_peers"
    http_status = 409

    def __init__(self) -> None:
        super().__init__(
            "peers cannot be named while a router runs: routers of a namespace share reservations "
            "over NATS, or by a list or a Service (allowed: nats_url, router_peers or "
            "router_service, at start)"
        )


class NoReplicaStreamError(KvRouterError):
    """A request for a stream of reservations at a router that shares none without a bus."""

    code = "no_replica_stream"
    http_status = 409

    def __init__(self) -> None:
        super().__init__(
            "this router shares no reservations without a bus (allowed: router_peers or "
            "router_service, at start)"
        )


class NoIndexerError(KvRouterError):
    """A scope without a registered or announced worker."""

    code = "no_indexer"
    http_status = 404

    def __init__(self, scope: Scope) -> None:
        super().__init__(f"no indexer for {_place(scope)}")
        self.model_name = scope.model_name
        self.routing_group = scope.routing_group


class InstanceNotFoundError(KvRouterError):
    """An instance, or a rank of it, that does not exist in this place."""

    code = "instance_not_found"
    http_status = 404

    def __init__(self, instance_id: int, detail: str = "") -> None:
        super().__init__(f"instance {instance_id}{detail and ' ' + detail} not found")
        self.instance_id = instance_id


class AlreadyRegisteredError(KvRouterError):
    """A rank that is known already, from a registration or from the bus."""

    code = "already_registered"
    http_status = 409

    def __init__(self, instance_id: int, dp_rank: int) -> None:
        super().__init__(f"instance {instance_id} dp_rank {dp_rank} already registered")
        self.instance_id = instance_id
        self.dp_rank = dp_rank


class AnnouncedInstanceError(KvRouterError):
    """A change of an instance that is announced on the bus, which only the bus can change."""

    code = "instance_announced"
    http_status = 409

    def __init__(self, instance_id: int) -> None:
        super().__init__(
            f"instance_id: {instance_id} is announced on the bus and cannot be changed here "
            "(allowed: an instance that was registered here)"
        )
        self.instance_id = instance_id


class OtherScopeError(KvRouterError):
    """An instance that is registered for another model or routing group."""

    code = "other_scope"
    http_status = 409

    def __init__(self, instance_id: int, scope: Scope) -> None:
        super().__init__(
            f"instance_id: {instance_id} is registered for {_place(scope)} "
            "(allowed: further ranks of the same)"
        )
        self.instance_id = instance_id


class BlockSizeMismatchError(KvRouterError):
    """A block size other than that of the scope's other workers."""

    code = "block_size_mismatch"
    http_status = 409

    def __init__(self, scope: Scope, existing: int, requested: int) -> None:
        super().__init__(
            f"block_size mismatch for {_place(scope)}: existing={existing}, requested={requested}"
        )
        self.existing = existing
        self.requested = requested


class SaltedHashesError(KvRouterError):
    """A salt beside block hashes, which must already contain it."""

    code = "cache_salt_not_accepted"
    http_status = 400

    def __init__(self, where: str) -> None:
        super().__init__(
            f"cache_salt is not accepted by {where}; "
            "block_hashes must already include the intended cache salt"
        )
        self.field = "cache_salt"


class AnswerTooLargeError(KvRouterError):
    """A response larger than a message on the bus may be."""

    code = "answer_too_large"
    http_status = 503

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(
            f"response: larger than a message (allowed: at most {limit_bytes} bytes; over HTTP, as "
            "with GET /dump, there is no limit)"
        )
        self.limit_bytes = limit_bytes


class UnsupportedFieldError(KvRouterError):
    """A feature of Dynamo's indexer that this version lacks."""

    code = "unsupported"
    http_status = 501

    def __init__(self, field: str, reason: str, allowed: str) -> None:
        super().__init__(f"{field}: {reason} (allowed: {allowed})")
        self.field = field
        self.reason = reason
        self.allowed = allowed


def _place(scope: Scope) -> str:
    return f"model={scope.model_name} routing_group={scope.routing_group}"


class DrainingError(KvRouterError):
    """The router is stopping, and no request can wait in it."""

    code = "draining"
    http_status = 503

    def __init__(self) -> None:
        super().__init__("this router is stopping (allowed: requests to other routers)")
        self.retry_after_s = 1.0
