"""The HTTP requests of `kv-router inspect`."""

from argparse import Namespace
from typing import Any, TypeVar

import httpx
import msgspec

from router.errors import ServerError, WireError
from router.protocol.catalogue import Lifecycle
from router.protocol.dumps import DumpedRank, decode_dump
from router.protocol.replies import OverlapScoresReply, ScopeLoads
from router.protocol.requests import PromptRequest
from router.protocol.values import UNREADABLE
from router.protocol.workers import BlockHolders, WorkerView
from router.runtime.process.settings import SettingView
from router.runtime.security.http_access import OPEN_ACCESS, HttpAccess

T = TypeVar("T")


def client_of(asked: Namespace) -> "InspectClient":
    """Return the client for the options of `arguments.add_router`. Raises ConfigError."""
    access = HttpAccess(asked.token_file, asked.ca_file, asked.cert_file, asked.key_file)
    return InspectClient(asked.url, access)


TIMEOUT_S = 10.0
_JSON = {"content-type": "application/json"}


class InspectClient:
    """A client of a running router; every request raises ServerError. To be closed."""

    def __init__(self, url: str, access: HttpAccess = OPEN_ACCESS) -> None:
        """Set up the client with these credentials. Raises ConfigError."""
        self._url = url.rstrip("/")
        options = access.options("client", url)
        self._client = httpx.Client(timeout=TIMEOUT_S, trust_env=False, **options)

    @property
    def url(self) -> str:
        """The router's URL."""
        return self._url

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def workers(self) -> list[WorkerView]:
        """Return all workers."""
        return self._reply("GET", "/workers", list[WorkerView])

    def worker(self, worker_id: int) -> WorkerView:
        """Return one worker."""
        return self._reply("GET", f"/workers/{worker_id}", WorkerView)

    def register(self, body: bytes) -> WorkerView:
        """Register a worker by the JSON of `POST /workers`; return its view."""
        return self._reply("POST", "/workers", WorkerView, body)

    def unregister(self, worker_id: int) -> WorkerView:
        """Remove a registered worker; return its last view."""
        return self._reply("DELETE", f"/workers/{worker_id}", WorkerView)

    def set_lifecycle(self, worker_id: int, lifecycle: Lifecycle) -> WorkerView:
        """Cordon a worker, drain it, or let it serve again; return its view."""
        body = msgspec.json.encode({"lifecycle": lifecycle})
        return self._reply("PATCH", f"/workers/{worker_id}", WorkerView, body)

    def config(self) -> dict[str, SettingView]:
        """Return every setting in force."""
        return self._reply("GET", "/config", dict[str, SettingView])

    def loads(self) -> list[ScopeLoads]:
        """Return the booked load of every rank."""
        return self._reply("GET", "/loads", list[ScopeLoads])

    def overlap_scores(self, prompt: PromptRequest) -> OverlapScoresReply:
        """Return the blocks of a prompt that each rank holds."""
        return self._reply(
            "POST", "/overlap_scores", OverlapScoresReply, msgspec.json.encode(prompt)
        )

    def block_holders(self, sequence_hash: int) -> BlockHolders:
        """Return the ranks that hold a block."""
        return self._reply("GET", f"/blocks/{sequence_hash}", BlockHolders)

    def held(self, worker_id: int, dp_rank: int) -> DumpedRank | None:
        """Return the blocks of a rank. Returns None if it has none."""
        path = f"/dump?worker_id={worker_id}&dp_rank={dp_rank}"
        try:
            return next(iter(decode_dump(self._answer("GET", path))), None)
        except WireError as error:
            raise ServerError(self._url + path, f"unreadable: {error.reason}") from error

    def _reply(self, method: str, path: str, kind: type[T], body: bytes | None = None) -> T:
        answer = self._answer(method, path, body)
        try:
            return msgspec.json.decode(answer, type=kind)
        except UNREADABLE as error:
            reason = f"not a response of this version's router: {error}"
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
        reply: dict[str, Any] = msgspec.json.decode(response.content, type=dict[str, Any])
    except UNREADABLE:
        reply = {}
    return str(reply.get("error") or f"status {response.status_code} without an error message")
