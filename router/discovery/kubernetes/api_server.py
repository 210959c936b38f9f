"""A client of a Kubernetes API server: lists objects, then watches from the list's version.

No client library: discovery needs two requests and a few fields, and the library takes 48 MB and
1.1 s of imports.

Errors of the API server's client; part of the tree in `router.errors`.

KvRouterError
└── ApiServerError               the request failed, or its response is invalid
    └── GoneError                the resource version has expired (410): list again
"""

import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Generic, NoReturn, TypeVar

import httpx
import msgspec
from msgspec import Struct

from router.config.discovery import ACCOUNT, ClusterConfig
from router.discovery.kubernetes.objects import (
    Change,
    ClusterObject,
    EndpointSlice,
    Page,
    Pod,
    Status,
)
from router.errors import ConfigError, KvRouterError
from router.protocol.values import UNREADABLE
from router.runtime.security.http_access import HttpAccess


class ApiServerError(KvRouterError):
    """A failed request to the API server, or an invalid response. `status`: None without one."""

    code = "api_server"

    def __init__(self, url: str, reason: str, status: int | None = None) -> None:
        super().__init__(f"{url}: {reason}")
        self.url = url
        self.reason = reason
        self.status = status


class GoneError(ApiServerError):
    """An expired resource version (410): only a new list helps."""


WATCH_S = 60
"""The duration requested for a watch; a new watch then replaces a connection that went silent."""
PAGE_OBJECTS = 500
MAX_PAGE_BYTES = 64 << 20
MAX_LINE_BYTES = 4 << 20
"""The limit of a watch line, which holds one object; the server limits objects to 1.5 MiB."""
MAX_REFUSAL_BYTES = 64 << 10
MOST_MESSAGE_CHARACTERS = 512
GONE = 410

T = TypeVar("T")
Q = TypeVar("Q", bound=ClusterObject)


class Resource(Struct, Generic[Q], frozen=True):
    """A kind of objects. `path`: of its list, with `{}` for the namespace."""

    name: str
    path: str
    kind: type[Q]


PODS = Resource("pods", "/api/v1/namespaces/{}/pods", Pod)
SLICES = Resource(
    "endpointslices", "/apis/discovery.k8s.io/v1/namespaces/{}/endpointslices", EndpointSlice
)


def api_url(config: ClusterConfig, environment: Mapping[str, str]) -> str:
    """Return the URL of the API server. Raises ConfigError if it is unknown."""
    if config.discovery_api_url:
        return config.discovery_api_url
    host = environment.get("KUBERNETES_SERVICE_HOST")
    if not host:
        reason = "empty, and KUBERNETES_SERVICE_HOST is not set: this is no pod"
        raise ConfigError("discovery_api_url", reason, "https://host:port")
    host = f"[{host}]" if ":" in host else host
    return f"https://{host}:{environment.get('KUBERNETES_SERVICE_PORT', '443')}"


def namespace_of(config: ClusterConfig) -> str:
    """Return the namespace to list and watch. Raises ConfigError if it is unknown."""
    if config.discovery_namespace:
        return config.discovery_namespace
    try:
        return Path(ACCOUNT, "namespace").read_text("ascii").strip()
    except OSError as error:
        reason = f"empty, and {ACCOUNT}/namespace: {error.strerror}"
        raise ConfigError("discovery_namespace", reason, "a namespace") from error


class ApiServer(Generic[Q]):
    """Objects of one kind in a namespace, selected by labels or fields.

    `chosen`: parameters of the API, such as `labelSelector`. Every method raises ApiServerError,
    and ConfigError for unusable credential files. The token and the CA certificates are read again
    for each request.
    """

    def __init__(
        self,
        config: ClusterConfig,
        resource: Resource[Q],
        namespace: str,
        chosen: Mapping[str, str],
    ) -> None:
        """Set up the decoders and credentials. Raises ConfigError."""
        self.resource = resource
        self._url = api_url(config, os.environ) + resource.path.format(namespace)
        self._chosen = chosen
        self._timeout_s = config.discovery_timeout_s
        ca_file = config.discovery_ca_file if self._url.startswith("https") else ""
        self._access = HttpAccess(config.discovery_token_file, ca_file)
        self._pages = msgspec.json.Decoder(Page)
        self._objects = msgspec.json.Decoder(resource.kind)
        self._changes = msgspec.json.Decoder(Change)
        self._statuses = msgspec.json.Decoder(Status)

    async def listed(self) -> tuple[list[Q], str]:
        """Return all objects, and the resource version of the list."""
        objects: list[Q] = []
        parameters = {**self._chosen, "limit": str(PAGE_OBJECTS)}
        while True:
            async with self._response(parameters, self._timeout_s) as response:
                body = b"".join([part async for part in self._bounded(response, MAX_PAGE_BYTES)])
            page = self._decoded(self._pages, body)
            objects += [self._object(each) for each in page.items]
            if not page.metadata.continue_:
                return objects, page.metadata.resource_version
            parameters["continue"] = page.metadata.continue_

    async def watched(
        self, version: str, on_open: Callable[[], None]
    ) -> AsyncIterator[tuple[str, Q]]:
        """Yield the changes since a resource version, each with its type; includes bookmarks.

        `on_open` is called once the server has accepted the watch. Ends when the server closes it.
        Raises GoneError if the server no longer has the version.
        """
        parameters = {
            **self._chosen,
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(WATCH_S),
        }
        async with self._response(parameters, WATCH_S + self._timeout_s) as response:
            on_open()
            async for line in self._lines(response):
                change = self._decoded(self._changes, line)
                if change.type == "ERROR":
                    self._raise(self._decoded(self._statuses, bytes(change.object)))
                yield change.type, self._object(change.object)

    @asynccontextmanager
    async def _response(
        self, parameters: dict[str, str], read_s: float
    ) -> AsyncIterator[httpx.Response]:
        timeout = httpx.Timeout(self._timeout_s, read=read_s)
        options = self._access.options("discovery", self._url)
        try:
            async with (
                httpx.AsyncClient(timeout=timeout, trust_env=False, **options) as client,
                client.stream("GET", self._url, params=parameters) as response,
            ):
                if response.status_code != httpx.codes.OK:
                    await self._refuse(response)
                yield response
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            raise ApiServerError(self._url, str(error) or type(error).__name__) from error

    async def _refuse(self, response: httpx.Response) -> NoReturn:
        """Raise the error of a refusal, which says its reason in its body."""
        code = response.status_code
        body = b"".join([part async for part in self._bounded(response, MAX_REFUSAL_BYTES)])
        try:
            status = self._statuses.decode(body)
        except UNREADABLE:
            status = Status()
        message = status.message or httpx.codes.get_reason_phrase(code)
        self._raise(Status(code, message[:MOST_MESSAGE_CHARACTERS]))

    def _raise(self, status: Status) -> NoReturn:
        kind = GoneError if status.code == GONE else ApiServerError
        raise kind(self._url, f"{status.code} {status.message}".strip(), status.code)

    async def _bounded(self, response: httpx.Response, most_bytes: int) -> AsyncIterator[bytes]:
        size_bytes = 0
        async for part in response.aiter_bytes():
            size_bytes += len(part)
            if size_bytes > most_bytes:
                raise ApiServerError(self._url, f"a response of more than {most_bytes} bytes")
            yield part

    async def _lines(self, response: httpx.Response) -> AsyncIterator[bytes]:
        rest = b""
        async for part in response.aiter_bytes():
            *lines, rest = (rest + part).split(b"\n")
            for line in filter(None, lines):
                yield line
            if len(rest) > MAX_LINE_BYTES:
                raise ApiServerError(self._url, f"an object of more than {MAX_LINE_BYTES} bytes")

    def _object(self, raw: msgspec.Raw) -> Q:
        return self._decoded(self._objects, bytes(raw))

    def _decoded(self, decoder: "msgspec.json.Decoder[T]", body: bytes) -> T:
        try:
            return decoder.decode(body)
        except UNREADABLE as error:
            raise ApiServerError(self._url, f"no {decoder.type}: {error}") from error
