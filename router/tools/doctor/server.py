"""A client of an engine's OpenAI server."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import httpx
import msgspec
from msgspec import Struct

from router.errors import ServerError, WireError
from router.protocol.values import UNREADABLE
from router.publisher.engine_metrics.dialects import DIALECTS, EngineKind, EngineLimits
from router.publisher.engine_metrics.metrics import EngineMetrics
from router.publisher.engine_metrics.prometheus_text import Sample, parse_samples

TIMEOUT_S = 30.0
_CACHE_INFO = "vllm:cache_config_info"
_CACHED_TOKENS = (
    "vllm:prefix_cache_hits_total",
    "sglang:cached_tokens_total",
    "trtllm_prompt_cached_tokens_total",
)


class ObservedServer(Struct, frozen=True):
    """The server's description of itself; absent facts are None or empty.

    `models`: names, including adapters with the name of their base model. `problem`: the reason why
    the server could not be queried at all.
    """

    url: str
    problem: str | None = None
    models: dict[str, str | None] = {}
    max_model_len: int | None = None
    version: str | None = None
    engine: EngineKind | None = None
    facts: EngineLimits = EngineLimits()
    has_prefix_caching: bool | None = None

    @property
    def base_model(self) -> str | None:
        """The one model that is no adapter; None if there are several, or none."""
        bases = [name for name, parent in self.models.items() if parent is None]
        return bases[0] if len(bases) == 1 else None


class Server:
    """Requests to an OpenAI server; `ask` raises ServerError. To be closed."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        self._client = httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def look(self) -> ObservedServer:
        """Query the server's models, version and metrics."""
        try:
            listed = await self.send("GET", "/v1/models")
        except ServerError as error:
            return ObservedServer(self._url, problem=error.reason)
        version = await self._optional("/version")
        metrics = await self._metrics()
        engine, facts = engine_in(metrics)
        models = [each for each in listed.get("data") or () if isinstance(each, dict)]
        return ObservedServer(
            self._url,
            models={str(each.get("id")): each.get("parent") for each in models},
            max_model_len=_longest(models),
            version=str(version["version"]) if "version" in version else None,
            engine=engine,
            facts=facts,
            has_prefix_caching=_prefix_caching(metrics),
        )

    async def cached_tokens(self) -> float | None:
        """Return the tokens found in its cache since its start. Returns None if it has no count."""
        found = [sample.value for sample in _samples(await self._metrics(), *_CACHED_TOKENS)]
        return sum(found) if found else None

    async def send(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the JSON object of a response. Raises ServerError."""
        url = self._url + path
        try:
            response = await self._client.request(method, url, json=body)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ServerError(url, str(error) or type(error).__name__) from error
        if not response.is_success:
            reason = f"status {response.status_code}: {response.text[:200]}"
            raise ServerError(url, reason, response.status_code)
        try:
            reply: dict[str, Any] = msgspec.json.decode(response.content, type=dict[str, Any])
        except UNREADABLE as error:
            raise ServerError(url, f"not an OpenAI server's response: {error}") from error
        return reply

    async def _optional(self, path: str) -> dict[str, Any]:
        try:
            return await self.send("GET", path)
        except ServerError:
            return {}

    async def _metrics(self) -> str:
        """Return its metrics; empty if it has none."""
        try:
            response = await self._client.get(f"{self._url}/metrics", follow_redirects=True)
        except httpx.HTTPError:
            return ""
        return response.text if response.is_success else ""


def engine_in(metrics: str) -> tuple[EngineKind | None, EngineLimits]:
    """Return the kind of engine with these metrics, and the facts in them."""
    for kind in DIALECTS:
        with suppress(WireError):
            read = EngineMetrics(kind, metrics)
            if not read.is_foreign:
                return kind, read.facts()
    return None, EngineLimits()


def _samples(metrics: str, *names: str) -> list[Sample]:
    try:
        return list(parse_samples(metrics, names))
    except WireError:
        return []


def _prefix_caching(metrics: str) -> bool | None:
    for sample in _samples(metrics, _CACHE_INFO):
        if reply := sample.labels.get("enable_prefix_caching"):
            return reply.lower() == "true"
    return None


def _longest(models: Sequence[Mapping[str, Any]]) -> int | None:
    lengths = [each.get("max_model_len") for each in models]
    return max((length for length in lengths if isinstance(length, int)), default=None)
