"""A cluster's API server: objects are listed, then watched from where the list ended."""

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NoReturn, TypeVar

import httpx
import msgspec

from router.discovery.errors import ApiServerError, GoneError
from router.discovery.objects import Change, ClusterObject, EndpointSlice, Page, Pod, Status
from router.discovery_config import ACCOUNT, DiscoveryConfig
from router.errors import ConfigError
from router.security.http_access import HttpAccess

WATCH_S = 60
"""The server is to end a watch after so long, so that one that went silent is found out."""
PAGE_OBJECTS = 500
MAX_PAGE_BYTES = 64 << 20
MAX_LINE_BYTES = 4 << 20
"""Of an object; the server itself has a limit of 1.5 MiB."""
GONE = 410

T = TypeVar("T")

PATHS = {
    "pods": "/api/v1/namespaces/{}/pods",
    "endpointslices": "/apis/discovery.k8s.io/v1/namespaces/{}/endpointslices",
}


def api_url(config: DiscoveryConfig, environment: Mapping[str, str]) -> str:
    """Where the server is. Raises ConfigError."""
    if config.discovery_api_url:
        return config.discovery_api_url
    host = environment.get("KUBERNETES_SERVICE_HOST")
    if not host:
        reason = "empty, and KUBERNETES_SERVICE_HOST is not set: this is no pod"
        raise ConfigError("discovery_api_url", reason, "https://host:port")
    host = f"[{host}]" if ":" in host else host
    return f"https://{host}:{environment.get('KUBERNETES_SERVICE_PORT', '443')}"


def namespace_of(config: DiscoveryConfig) -> str:
    """The namespace to look in. Raises ConfigError."""
    if config.discovery_namespace:
        return config.discovery_namespace
    try:
        return Path(ACCOUNT, "namespace").read_text("ascii").strip()
    except OSError as error:
        reason = f"empty, and {ACCOUNT}/namespace: {error.strerror}"
        raise ConfigError("discovery_namespace", reason, "a namespace") from error


class ApiServer:
    """Objects of one kind, by label. Every method raises ApiServerError, and ConfigError for files
    that cannot be used; token and authorities are read again at each request.
    """

    def __init__(self, config: DiscoveryConfig) -> None:
        """Raises ConfigError."""
        self.namespace = namespace_of(config)
        path = PATHS[config.discovery].format(self.namespace)
        self._url = api_url(config, os.environ) + path
        self._selector = config.discovery_selector
        self._timeout_s = config.discovery_timeout_s
        ca_file = config.discovery_ca_file if self._url.startswith("https") else ""
        self._access = HttpAccess(config.discovery_token_file, ca_file)
        self._pages = msgspec.json.Decoder(Page)
        self._objects = _decoder(config)
        self._changes = msgspec.json.Decoder(Change)
        self._statuses = msgspec.json.Decoder(Status)

    async def listed(self) -> tuple[list[ClusterObject], str]:
        """Every object, and the version that the list is of."""
        objects: list[ClusterObject] = []
        parameters = {"labelSelector": self._selector, "limit": str(PAGE_OBJECTS)}
        while True:
            async with self._asked(parameters, self._timeout_s) as response:
                body = b"".join([part async for part in self._bounded(response)])
            page = self._decoded(self._pages, body)
            objects += [self._object(each) for each in page.items]
            if not page.metadata.continue_:
                return objects, page.metadata.resource_version
            parameters["continue"] = page.metadata.continue_

    async def watched(self, version: str) -> AsyncIterator[tuple[str, ClusterObject]]:
        """Changes since a version, by type; bookmarks as well. Ends when the server says so. Raises
        GoneError when it has forgotten the version.
        """
        parameters = {
            "labelSelector": self._selector,
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(WATCH_S),
        }
        async with self._asked(parameters, WATCH_S + self._timeout_s) as response:
            async for line in self._lines(response):
                change = self._decoded(self._changes, line)
                if change.type == "ERROR":
                    self._raise(self._decoded(self._statuses, bytes(change.object)))
                yield change.type, self._object(change.object)

    @asynccontextmanager
    async def _asked(
        self, parameters: dict[str, str], read_s: float
    ) -> AsyncIterator[httpx.Response]:
        timeout = httpx.Timeout(self._timeout_s, read=read_s)
        options = self._access.options("discovery")
        try:
            async with (
                httpx.AsyncClient(timeout=timeout, trust_env=False, **options) as client,
                client.stream("GET", self._url, params=parameters) as response,
            ):
                if response.status_code != httpx.codes.OK:
                    raise self._refusal(response.status_code)
                yield response
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            raise ApiServerError(self._url, str(error) or type(error).__name__) from error

    def _refusal(self, code: int) -> ApiServerError:
        kind = GoneError if code == GONE else ApiServerError
        return kind(self._url, f"{code} {httpx.codes.get_reason_phrase(code)}".strip())

    def _raise(self, status: Status) -> NoReturn:
        kind = GoneError if status.code == GONE else ApiServerError
        raise kind(self._url, f"{status.code} {status.message}".strip())

    async def _bounded(self, response: httpx.Response) -> AsyncIterator[bytes]:
        size_bytes = 0
        async for part in response.aiter_bytes():
            size_bytes += len(part)
            if size_bytes > MAX_PAGE_BYTES:
                raise ApiServerError(self._url, f"a page of more than {MAX_PAGE_BYTES} bytes")
            yield part

    async def _lines(self, response: httpx.Response) -> AsyncIterator[bytes]:
        rest = b""
        async for part in response.aiter_bytes():
            *lines, rest = (rest + part).split(b"\n")
            for line in filter(None, lines):
                yield line
            if len(rest) > MAX_LINE_BYTES:
                raise ApiServerError(self._url, f"an object of more than {MAX_LINE_BYTES} bytes")

    def _object(self, raw: msgspec.Raw) -> ClusterObject:
        return self._decoded(self._objects, bytes(raw))

    def _decoded(self, decoder: "msgspec.json.Decoder[T]", body: bytes) -> T:
        try:
            return decoder.decode(body)
        except msgspec.MsgspecError as error:
            raise ApiServerError(self._url, f"no {decoder.type}: {error}") from error


def _decoder(config: DiscoveryConfig) -> "msgspec.json.Decoder[ClusterObject]":
    kind: type[ClusterObject] = Pod if config.discovery == "pods" else EndpointSlice
    return msgspec.json.Decoder(kind)
