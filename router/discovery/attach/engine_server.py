"""The description of itself that an engine's OpenAI server gives."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any

from msgspec import Struct

from router.discovery.attach.engine_client import EngineClient, Response
from router.discovery.attach.event_sockets import RankSockets, sglang_sockets, vllm_sockets
from router.errors import ServerError, WireError
from router.publisher.engine_metrics.dialects import DIALECTS, EngineKind, EngineLimits
from router.publisher.engine_metrics.metrics import EngineMetrics
from router.publisher.engine_metrics.prometheus_text import Sample, parse_samples

_OWNERS: Mapping[str, EngineKind] = MappingProxyType(
    {"vllm": "vllm", "sglang": "sglang", "tensorrt_llm": "trtllm"}
)
_CACHE_INFO = "vllm:cache_config_info"
_CACHED_TOKENS = (
    "vllm:prefix_cache_hits_total",
    "sglang:cached_tokens_total",
    "trtllm_prompt_cached_tokens_total",
)
_DRAFTS = "vllm:spec_decode_num_drafts_total"
_STARTED = "process_start_time_seconds"
_SERVED_TOKENS = (
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "sglang:prompt_tokens_total",
    "sglang:generation_tokens_total",
    "trtllm_prompt_tokens_total",
    "trtllm_generation_tokens_total",
)


class ObservedServer(Struct, frozen=True):
    """The server's description of itself; absent facts are None or empty.

    `models`: names, including adapters with the name of their base model; `aliases`: further names
    of the first. `problem`: the reason why the server could not be queried at all, with `status`,
    `software` and `media_type` of the list of models if it answered. `needs_key`: it lists its
    models only with a key, and the model is known from its metrics. `owner`: the software that
    serves the models, by its own name. `rank_count`: ranks with metrics. `sockets`: of each rank;
    None if the engine does not name them. `started_s`: the time at which its process started;
    `served_tokens`: those since then. `generates`: False if it serves embeddings and scores only.
    `drafts_tokens`: it speculates, by a draft model, layers of its own or n-grams.
    """

    url: str
    problem: str | None = None
    status: int | None = None
    software: str = ""
    media_type: str = ""
    needs_key: bool = False
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
    started_s: float | None = None
    served_tokens: float | None = None
    generates: bool = True
    drafts_tokens: bool = False

    @property
    def base_model(self) -> str | None:
        """The one model that is no adapter or alias; None if there are several, or none."""
        bases = [name for name, parent in self.models.items() if parent is None]
        bases = [name for name in bases if name not in self.aliases]
        return bases[0] if len(bases) == 1 else None


class Server:
    """An engine's OpenAI server. `client`: requests to it; to be closed."""

    def __init__(self, client: EngineClient) -> None:
        self.client = client

    async def close(self) -> None:
        """Close the connections."""
        await self.client.close()

    async def look(self) -> ObservedServer:
        """Query the server's models, version, metrics and event sockets."""
        try:
            listed = await self.client.fetch("GET", "/v1/models")
        except ServerError as error:
            return ObservedServer(self.client.url, problem=error.reason)
        metrics = await self._metrics()
        engine, facts, rank_count = engine_in(metrics)
        try:
            cards = self._cards(listed, facts)
        except ServerError as error:
            return ObservedServer(
                self.client.url,
                problem=error.reason,
                status=listed.status,
                software=listed.software,
                media_type=listed.media_type,
                engine=engine,
            )
        owner = next((str(each["owned_by"]) for each in cards if each.get("owned_by")), "")
        engine = _OWNERS.get(owner, engine)
        version = (await self._optional("/version")).get("version")
        sockets = await self._sockets(engine)
        return ObservedServer(
            self.client.url,
            needs_key=listed.status != 200,
            models={str(each.get("id")): each.get("parent") for each in cards},
            aliases=_aliases(cards),
            max_model_len=_longest(cards),
            owner=owner,
            version=None if version is None else str(version),
            engine=engine,
            facts=facts,
            rank_count=rank_count,
            has_prefix_caching=_prefix_caching(metrics),
            sockets=sockets,
            started_s=_first(metrics, _STARTED),
            served_tokens=_sum(metrics, *_SERVED_TOKENS),
            generates=bool(sockets) or engine != "vllm" or await self._generates(),
            drafts_tokens=_first(metrics, _DRAFTS) is not None,
        )

    async def cached_tokens(self) -> float | None:
        """Return the tokens found in its cache since its start. Returns None if it has no count."""
        return _sum(await self._metrics(), *_CACHED_TOKENS)

    def _cards(self, listed: Response, facts: EngineLimits) -> list[dict[str, Any]]:
        """Return the models of the server: as it lists them, or else that of its metrics."""
        if listed.status in (401, 403) and facts.model_name is not None:
            return [{"id": facts.model_name}]
        if listed.status != 200:
            raise ServerError(self.client.url, f"status {listed.status}", listed.status)
        data = self.client.decoded("/v1/models", listed).get("data")
        if not isinstance(data, list):
            raise ServerError(self.client.url, "not an OpenAI server's response", listed.status)
        return [each for each in data if isinstance(each, dict)]

    async def _optional(self, path: str) -> dict[str, Any]:
        try:
            return await self.client.send("GET", path)
        except ServerError:
            return {}

    async def _metrics(self) -> str:
        """Return its metrics; empty if it has none. Older servers have them below `/metrics/`."""
        for path in ("/metrics", "/metrics/"):
            try:
                response = await self.client.fetch("GET", path)
            except ServerError:
                return ""
            if not 300 <= response.status < 400:
                is_good = response.status == 200
                return response.content.decode(errors="replace") if is_good else ""
        return ""

    async def _sockets(self, engine: EngineKind | None) -> dict[int, RankSockets] | None:
        if engine == "sglang":
            info = await self._optional("/server_info")
            return sglang_sockets(info["kv_events"]) if "kv_events" in info else None
        try:
            return vllm_sockets(await self.client.send("GET", "/kv_event_sources"))
        except ServerError:
            return None

    async def _generates(self) -> bool:
        """Return whether vLLM serves completions; True if it does not list its routes."""
        routes = (await self._optional("/openapi.json")).get("paths")
        return not isinstance(routes, dict) or "/v1/completions" in routes or not routes


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


def _first(metrics: str, name: str) -> float | None:
    return next((each.value for each in _samples(metrics, name)), None)


def _sum(metrics: str, *names: str) -> float | None:
    found = [each.value for each in _samples(metrics, *names)]
    return sum(found) if found else None


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
