"""Errors of copies between blocks."""

from router.errors import KvRouterError


class TransferError(KvRouterError):
    """Blocks that cannot be copied to each other; nothing was copied. `rule`: the broken rule."""

    code = "transfer"

    def __init__(self, field: str, reason: str, allowed: str, *, rule: str) -> None:
        super().__init__(f"{field}: {reason} (allowed: {allowed})")
        self.field = field
        self.rule = rule
