"""What goes wrong between us and a cluster's API server; part of the tree in `router.errors`.

KvRouterError
└── ApiServerError               it could not be asked, or did not answer as it should
    └── GoneError                it has forgotten where we were (410): list again
"""

from router.errors import KvRouterError


class ApiServerError(KvRouterError):
    """The API server could not be asked, or did not answer as it should."""

    code = "api_server"

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(f"{url}: {reason}")
        self.url = url
        self.reason = reason


class GoneError(ApiServerError):
    """It has forgotten the version that we were at; only a new list helps."""
