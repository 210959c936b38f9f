"""What callers see beside the router's own refusals, which are rebuilt as what they were raised as.

KvRouterError
├── UnansweredError      no router answered
└── RefusedError         a router refused, with a code that this version does not know
"""

from typing import Any

from router.errors import KvRouterError


class UnansweredError(KvRouterError):
    """No router answered. `is_maybe_done`: one may have done what was asked, all the same."""

    code = "unanswered"
    http_status = 503

    def __init__(self, router: str, reason: str, *, is_maybe_done: bool) -> None:
        super().__init__(f"{router}: {reason}")
        self.router = router
        self.reason = reason
        self.is_maybe_done = is_maybe_done


class RefusedError(KvRouterError):
    """A router, or something before it, refused, and this version does not know that refusal."""

    def __init__(self, status: int, body: dict[str, Any]) -> None:
        super().__init__(str(body.get("error", f"refused with status {status}")))
        self.http_status = status  # type: ignore[misc]
        self.code = str(body.get("code", "refused"))  # type: ignore[misc]
        self.fields = body
