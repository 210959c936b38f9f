"""The questions of `kv-router inspect`, over HTTP."""

from typing import Any, TypeVar

import httpx
import msgspec

from router.block_views import BlockHolders
from router.errors import ServerError, WireError
from router.protocol.dumps import DumpedRank, decode_dump
from router.protocol.replies import OverlapScoresReply
from router.protocol.requests import PromptRequest
from router.security.http_access import OPEN_ACCESS, HttpAccess
from router.worker_views import WorkerView

T = TypeVar("T")

TIMEOUT_S = 10.0
_JSON = {"content-type": "application/json"}


class RouterClient:
    """A running router, asked. Every question raises ServerError. To be closed."""

    def __init__(self, url: str, access: HttpAccess = OPEN_ACCESS) -> None:
        """`access`: how to log in. Raises ConfigError."""
        self._url = url.rstrip("/")
        options = access.options("client")
        self._client = httpx.Client(timeout=TIMEOUT_S, trust_env=False, **options)

    def close(self) -> None:
        """Let go of the connection."""
        self._client.close()

    def workers(self) -> list[WorkerView]:
        """Every worker."""
        return self._asked("GET", "/workers", list[WorkerView])

    def worker(self, worker_id: int) -> WorkerView:
        """One worker."""
        return self._asked("GET", f"/workers/{worker_id}", WorkerView)

    def overlap_scores(self, prompt: PromptRequest) -> OverlapScoresReply:
        """Who holds how much of a prompt."""
        return self._asked(
            "POST", "/overlap_scores", OverlapScoresReply, msgspec.json.encode(prompt)
        )

    def block_holders(self, sequence_hash: int) -> BlockHolders:
        """Who holds a block."""
        return self._asked("GET", f"/blocks/{sequence_hash}", BlockHolders)

    def held(self, worker_id: int, dp_rank: int) -> DumpedRank | None:
        """What a rank holds, block by block; None for nothing."""
        path = f"/dump?worker_id={worker_id}&dp_rank={dp_rank}"
        try:
            return next(iter(decode_dump(self._answer("GET", path))), None)
        except WireError as error:
            raise ServerError(self._url + path, f"unreadable: {error.reason}") from error

    def _asked(self, method: str, path: str, kind: type[T], body: bytes | None = None) -> T:
        answer = self._answer(method, path, body)
        try:
            return msgspec.json.decode(answer, type=kind)
        except msgspec.DecodeError as error:
            reason = f"answers as no router of this version does: {error}"
            raise ServerError(self._url + path, reason) from error

    def _answer(self, method: str, path: str, body: bytes | None = None) -> bytes:
        url = self._url + path
        try:
            response = self._client.request(method, url, content=body, headers=_JSON)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ServerError(
                self._url, f"no router there: {error or type(error).__name__}"
            ) from error
        if response.is_success:
            return response.content
        raise ServerError(url, _refusal(response), response.status_code)


def _refusal(response: httpx.Response) -> str:
    try:
        said: dict[str, Any] = msgspec.json.decode(response.content, type=dict[str, Any])
    except msgspec.DecodeError:
        said = {}
    return str(said.get("error") or f"status {response.status_code}, and not a router's words")
