"""An engine's OpenAI server, asked."""

import re
from collections.abc import Mapping
from typing import Any

import httpx
import msgspec
from msgspec import Struct

from router.errors import ServerError
from router.tools.doctor.config import Engine

TIMEOUT_S = 30.0
_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_PREFIXES: Mapping[str, Engine] = {"vllm:": "vllm", "sglang:": "sglang", "trtllm_": "trtllm"}
_CACHE_INFO = ("vllm:cache_config_info", "sglang:cache_config_info")
_HITS = ("vllm:prefix_cache_hits_total", "sglang:cached_tokens_total")


class ServerSeen(Struct, frozen=True):
    """What it says of itself; None and empty where it does not say.

    `models`: names, adapters among them with the name of what they adapt. `problem`: why it could
    not be asked at all.
    """

    url: str
    problem: str | None = None
    models: dict[str, str | None] = {}
    max_model_len: int | None = None
    version: str | None = None
    engine: Engine | None = None
    block_size: int | None = None
    num_gpu_blocks: int | None = None
    has_prefix_caching: bool | None = None
    has_metrics: bool = False

    @property
    def base_model(self) -> str | None:
        """The one model that is no adapter; None if there are several, or none."""
        bases = [name for name, parent in self.models.items() if parent is None]
        return bases[0] if len(bases) == 1 else None


class Server:
    """Requests to an OpenAI server; all raise ServerError. To be closed."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        self._client = httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False)

    async def close(self) -> None:
        """Let go of the connections."""
        await self._client.aclose()

    async def look(self) -> ServerSeen:
        """What it says of itself."""
        try:
            listed = await self.ask("GET", "/v1/models")
        except ServerError as error:
            return ServerSeen(self._url, problem=error.reason)
        version = await self._optional("/version")
        metrics = await self.metrics()
        info = _cache_info(metrics)
        models = [each for each in listed.get("data") or () if isinstance(each, dict)]
        return ServerSeen(
            self._url,
            models={str(each.get("id")): each.get("parent") for each in models},
            max_model_len=next((_number(each.get("max_model_len")) for each in models), None),
            version=str(version["version"]) if "version" in version else None,
            engine=_engine(metrics),
            block_size=_number(info.get("block_size") or info.get("page_size")),
            num_gpu_blocks=_number(info.get("num_gpu_blocks") or info.get("num_pages")),
            has_prefix_caching=_truth(info.get("enable_prefix_caching")),
            has_metrics=bool(metrics),
        )

    async def cache_hits(self) -> float | None:
        """Tokens that it found in its cache since its start; None if it does not count."""
        found = [float(v) for n, _, v in _SAMPLE.findall(await self.metrics()) if n in _HITS]
        return sum(found) if found else None

    async def metrics(self) -> str:
        """Its metrics; empty where it has none."""
        try:
            response = await self._client.get(f"{self._url}/metrics")
        except httpx.HTTPError:
            return ""
        return response.text if response.is_success else ""

    async def ask(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """The JSON object that it answers."""
        url = self._url + path
        try:
            response = await self._client.request(method, url, json=body)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ServerError(url, str(error) or type(error).__name__) from error
        if not response.is_success:
            reason = f"status {response.status_code}: {response.text[:200]}"
            raise ServerError(url, reason, response.status_code)
        try:
            said: dict[str, Any] = msgspec.json.decode(response.content, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise ServerError(url, f"not an OpenAI server's answer: {error}") from error
        return said

    async def _optional(self, path: str) -> dict[str, Any]:
        try:
            return await self.ask("GET", path)
        except ServerError:
            return {}


def _engine(metrics: str) -> Engine | None:
    names = [name for name, _, _ in _SAMPLE.findall(metrics)]
    for prefix, engine in _PREFIXES.items():
        if any(name.startswith(prefix) for name in names):
            return engine
    return None


def _cache_info(metrics: str) -> dict[str, str]:
    for name, labels, _ in _SAMPLE.findall(metrics):
        if name in _CACHE_INFO:
            return dict(_LABEL.findall(labels))
    return {}


def _number(value: object) -> int | None:
    text = str(value)
    return int(text) if text.isdecimal() else None


def _truth(text: str | None) -> bool | None:
    return None if text is None else text.lower() == "true"
