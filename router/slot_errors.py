"""What a request's slot in a connector refuses; part of the tree in `errors`.

KvRouterError
└── SlotError
    ├── SlotNotFoundError        no slot has this key
    ├── SlotStateError           not in this state; nothing was done
    ├── SlotOperationError       not like this, in whatever state; nothing was done
    └── SlotPoolError            a pool refused, in whose words
"""

from router.errors import KvRouterError

RequestKey = str | int


class SlotError(KvRouterError):
    """A slot cannot do what was asked of it; it is left as it was."""

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
    """The slot is not in a state for this."""

    code = "slot_state"

    def __init__(self, key: RequestKey, operation: str, state: str, why: str = "") -> None:
        super().__init__(f"slot {key}: {operation} while {state}{why and ': ' + why}")
        self.key = key
        self.operation = operation
        self.state = state


class SlotOperationError(SlotError):
    """The operation is not possible like this."""

    code = "slot_operation"

    def __init__(self, key: RequestKey, field: str, reason: str, allowed: str) -> None:
        super().__init__(f"slot {key}: {field}: {reason} (allowed: {allowed})")
        self.key = key
        self.field = field
        self.reason = reason
        self.allowed = allowed


class SlotPoolError(SlotError):
    """A pool of blocks refused; `refusal` is what it said."""

    code = "slot_pool"

    def __init__(self, refusal: KvRouterError) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal
