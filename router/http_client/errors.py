"""What goes wrong between us and a server that we ask.

KvRouterError
└── UpstreamError            no answer, or none that is one
    └── NeverSentError       nobody can have heard the request
"""

from typing import Literal, TypeAlias

from router.errors import KvRouterError

UpstreamProblem: TypeAlias = Literal[
    "refused", "connect timeout", "timeout", "closed", "cut off", "malformed", "too large", "busy"
]


class UpstreamError(KvRouterError):
    """A server did not answer as HTTP servers do. `problem`: what it did instead.

    `closed`: the connection ended before any byte of an answer; `cut off`: in the middle of one.
    """

    code = "upstream_failed"
    http_status = 502

    def __init__(self, server: str, problem: UpstreamProblem, detail: str = "") -> None:
        super().__init__(f"{server}: {problem}{f': {detail}' if detail else ''}")
        self.server = server
        self.problem = problem
        self.detail = detail


class NeverSentError(UpstreamError):
    """No connection could be had: trying again, here or elsewhere, repeats nothing."""

    code = "upstream_unreachable"
    http_status = 503
