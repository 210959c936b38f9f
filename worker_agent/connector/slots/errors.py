"""Errors of slots. Each leaves its slot unchanged."""

from router.errors import KvRouterError

RequestKey = str | int


class SlotError(KvRouterError):
    """A slot cannot perform an operation; its state is unchanged."""

    code = "slot"
    http_status = 409


class SlotNotFoundError(SlotError):
    """No slot has this key."""

    code = "slot_not_found"
    http_status = 404

    def __init__(self, key: RequestKey) -> None:
        super().__init__(f"slot {key} not found (never created, or removed)")
        self.key = key


class SlotStateError(SlotError):
    """The slot's state does not allow the operation."""

    code = "slot_state"

    def __init__(self, key: RequestKey, operation: str, state: str, why: str = "") -> None:
        super().__init__(f"slot {key}: {operation} while {state}{why and ': ' + why}")
        self.key = key
        self.operation = operation
        self.state = state


class SlotOperationError(SlotError):
    """The operation is not allowed with these arguments."""

    code = "slot_operation"

    def __init__(self, key: RequestKey, field: str, reason: str, allowed: str) -> None:
        super().__init__(f"slot {key}: {field}: {reason} (allowed: {allowed})")
        self.key = key
        self.field = field
        self.reason = reason
        self.allowed = allowed


class SlotPoolError(SlotError):
    """A pool of blocks refused the operation; `refusal` is its error."""

    code = "slot_pool"

    def __init__(self, refusal: KvRouterError) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal
