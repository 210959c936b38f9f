"""A client of an engine's OpenAI server, and what such a server says of itself."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any

import httpx
import msgspec
from msgspec import Struct

from router.discovery.attach.event_sockets import RankSockets, sglang_sockets, vllm_sockets
from router.errors import ServerError, WireError
from router.protocol.values import UNREADABLE
from router.publisher.engine_metrics.dialects import DIALECTS, EngineKind, EngineLimits
from router.publisher.engine_metrics.metrics import EngineMetrics
from router.publisher.engine_metrics.prometheus_text import Sample, parse_samples

TIMEOUT_S = 30.0
MOST_BYTES = 32 * 1024 * 1024
"""Limit of a response; the metrics of a large engine have about 1 MB."""

NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})

_OWNERS: Mapping[str, EngineKind] = MappingProxyType(
    {"vllm": "vllm", "sglang": "sglang", "tensorrt_llm": "trtllm"}
)
_CACHE_INFO = "vllm:cache_config_info"
_CACHED_TOKENS = (
    "vllm:prefix_cache_hits_total",
    "sglang:cached_tokens_total",
    "trtllm_prompt_cached_tokens_total",
)


class ObservedServer(Struct, frozen=True):
    """The server's description of itself; absent facts are None or empty.

    `models`: names, including adapters with the name of their base model; `aliases`: further names
    of the first. `problem`: the reason why the server could not be queried at all, with `status`
    if it answered. `owner`: the software that serves the models, by its own name. `rank_count`:
    ranks with metrics. `sockets`: of each rank; None if the engine does not name them.
    """

    url: str
    problem: str | None = None
    status: int | None = None
    models: dict[str, str | None] = {}
    aliases: tuple[str, ...] = ()
    max_model_len: int | None = None
    owner: str = ""
    version: str | None = None
    engine: EngineKind | None = None
    facts: EngineLimits = EngineLimits()
    rank_count: int = 0
    has_prefix_caching: bool | None = None
    sockets: dict[int, RankSockets] | None = None

    @property
    def base_model(self) -> str | None:
        """The one model that is no adapter or alias; None if there are several, or none."""
        bases = [name for name, parent in self.models.items() if parent is None]
        bases = [name for name in bases if name not in self.aliases]
        return bases[0] if len(bases) == 1 else None


class Server:
    """Requests to an OpenAI server; `send` raises ServerError. To be closed.

    Redirects are not followed, and a response has a limit of bytes: the server may be a stranger.
    """

    def __init__(
        self, url: str, timeout_s: float = TIMEOUT_S, options: Mapping[str, Any] = NO_OPTIONS
    ) -> None:
        """Set up a client; `options`: of httpx, such as credentials."""
        self._url = url.rstrip("/").removesuffix("/v1")
        self._timeout_s = timeout_s
        self._client = httpx.AsyncClient(timeout=timeout_s, trust_env=False, **options)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def look(self) -> ObservedServer:
        """Query the server's models, version, metrics and event sockets."""
        try:
            listed = await self.send("GET", "/v1/models")
        except ServerError as error:
            return ObservedServer(self._url, problem=error.reason, status=error.status)
        version = (await self._optional("/version")).get("version")
        metrics = await self._metrics()
        engine, facts, rank_count = engine_in(metrics)
        cards = [each for each in listed.get("data") or () if isinstance(each, dict)]
        owner = next((str(each["owned_by"]) for each in cards if each.get("owned_by")), "")
        engine = _OWNERS.get(owner, engine)
        return ObservedServer(
            self._url,
            models={str(each.get("id")): each.get("parent") for each in cards},
            aliases=_aliases(cards),
            max_model_len=_longest(cards),
            owner=owner,
            version=None if version is None else str(version),
            engine=engine,
            facts=facts,
            rank_count=rank_count,
            has_prefix_caching=_prefix_caching(metrics),
            sockets=await self._sockets(engine),
        )

    async def cached_tokens(self) -> float | None:
        """Return the tokens found in its cache since its start. Returns None if it has no count."""
        found = [sample.value for sample in _samples(await self._metrics(), *_CACHED_TOKENS)]
        return sum(found) if found else None

    async def send(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the JSON object of a response. Raises ServerError."""
        content = await self._content(method, path, body)
        try:
            reply: dict[str, Any] = msgspec.json.decode(content, type=dict[str, Any])
        except UNREADABLE as error:
            reason = f"not an OpenAI server's response: {error}"
            raise ServerError(self._url + path, reason, 200) from error
        return reply

    async def _content(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> bytes:
        url, content = self._url + path, bytearray()
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self._client.stream(method, url, json=body) as response,
            ):
                async for chunk in response.aiter_bytes():
                    content += chunk
                    if len(content) > MOST_BYTES:
                        raise ServerError(url, f"more than {MOST_BYTES} bytes")
        except TimeoutError as error:
            raise ServerError(url, f"no response in {self._timeout_s:g} s") from error
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            raise ServerError(url, str(error) or type(error).__name__) from error
        if not response.is_success:
            text = content[:200].decode(errors="replace")
            reason = f"status {response.status_code}: {text}"
            raise ServerError(url, reason, response.status_code)
        return bytes(content)

    async def _optional(self, path: str) -> dict[str, Any]:
        try:
            return await self.send("GET", path)
        except ServerError:
            return {}

    async def _metrics(self) -> str:
        """Return its metrics; empty if it has none. Older servers have them below `/metrics/`."""
        for path in ("/metrics", "/metrics/"):
            try:
                return (await self._content("GET", path)).decode(errors="replace")
            except ServerError as error:
                if error.status is None or not 300 <= error.status < 400:
                    return ""
        return ""

    async def _sockets(self, engine: EngineKind | None) -> dict[int, RankSockets] | None:
        if engine == "sglang":
            info = await self._optional("/server_info")
            return sglang_sockets(info["kv_events"]) if "kv_events" in info else None
        try:
            return vllm_sockets(await self.send("GET", "/kv_event_sources"))
        except ServerError:
            return None


def engine_in(metrics: str) -> tuple[EngineKind | None, EngineLimits, int]:
    """Return the kind of engine with these metrics, the facts in them, and its ranks."""
    for kind in DIALECTS:
        with suppress(WireError):
            read = EngineMetrics(kind, metrics)
            if not read.is_foreign:
                return kind, read.facts(), read.rank_count
    return None, EngineLimits(), 0


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


def _aliases(cards: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the further names of the first model: those of the same weights."""
    bases = [each for each in cards if each.get("parent") is None]
    roots = [each.get("root") for each in bases]
    return tuple(
        str(each.get("id"))
        for each, root in list(zip(bases, roots, strict=True))[1:]
        if root is not None and root == roots[0]
    )
