"""Settings of an OpenAI endpoint: in a process of its own, or in the router's."""

import re
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, TypeAlias

from msgspec import Meta, Struct

from router.errors import ConfigError
from router.runtime.process.settings import COMMON, about
from router.runtime.security.config import check_readable

if TYPE_CHECKING:
    from router.runtime.http_client import PoolLimits

MOST_ORIGINS = 64
_ORIGIN = re.compile(
    r"(?P<scheme>https?)://(?:[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?|\[[0-9a-f:.]{2,45}\])"
    r"(?::(?P<port>[1-9][0-9]{0,4}))?"
)
"""An exact origin in lower case: neither a pattern nor `null`, which any page can be."""

ConditionalPolicy: TypeAlias = Literal["isl_bounding", "prefill_load", "isl_or_load"]


class EngineConfig(Struct, frozen=True, kw_only=True):
    """Connections to engines, and what follows when one fails."""

    GROUP: ClassVar[str] = "OpenAI endpoint"

    engine_token_file: Annotated[
        str, about("file with a token for the engines, instead of the client's own")
    ] = ""
    engine_connections: Annotated[
        int, about("connections to each engine; beyond that, another worker is tried", ge=1)
    ] = 2048
    connect_timeout_s: Annotated[
        float, about("time to connect to an engine; after that another worker is tried", gt=0)
    ] = 3.0
    first_byte_timeout_s: Annotated[
        float,
        about("time for an engine to begin its response; after that another worker is tried", gt=0),
    ] = 600.0
    idle_timeout_s: Annotated[
        float, about("timeout of a response that brings no new data", gt=0)
    ] = 120.0
    answer_limit_bytes: Annotated[
        int, about("size of a response that is no stream; beyond that, 502", ge=1024)
    ] = 64 * 1024 * 1024
    max_attempts: Annotated[
        int, about("workers tried for one request", ge=1, le=64, unit="WORKERS")
    ] = 3
    max_migrations: Annotated[
        int,
        about(
            "limit of migrations of a stream to another worker; 0: none",
            ge=0,
            le=64,
            unit="MIGRATIONS",
        ),
    ] = 2
    breaker_failures: Annotated[
        int,
        about(
            "failures in a row after which a worker is avoided for a while", ge=1, unit="FAILURES"
        ),
    ] = 5
    breaker_open_s: Annotated[
        float, about("time it is avoided at first; doubled by each failed probe", gt=0)
    ] = 5.0
    probe_interval_s: Annotated[
        float,
        about("time between health probes of each worker; 0: only failed ones are probed", ge=0),
    ] = 10.0

    @property
    def pool_limits(self) -> "PoolLimits":
        """Limits of connections to engines."""
        from router.runtime.http_client import PoolLimits

        return PoolLimits(
            self.engine_connections, self.connect_timeout_s, self.first_byte_timeout_s
        )


class PrefillConfig(Struct, frozen=True, kw_only=True):
    """Disaggregated serving."""

    GROUP: ClassVar[str] = "OpenAI endpoint"

    disaggregation: Annotated[
        Literal["auto", "off"],
        about("auto: workers of role prefill compute prompts as soon as there are any"),
    ] = "auto"
    prefill_fallback: Annotated[
        Literal["always", "unregistered"],
        about(
            "whether the decode worker computes the prompt as well: always, if "
            "prefill fails; or only if there is no worker of role prefill"
        ),
    ] = "always"
    prefill_timeout_s: Annotated[
        float,
        about(
            "time for a prefill worker to compute a prompt; after that the next one is tried", gt=0
        ),
    ] = 120.0
    conditional_disagg: Annotated[
        ConditionalPolicy | Literal["off"],
        about("rule by which the decode worker computes prompts itself; off: none"),
    ] = "off"
    conditional_eff_isl_threshold: Annotated[
        int, about("isl_bounding, isl_or_load: limit of the uncached tokens", ge=0, unit="TOKENS")
    ] = 2048
    conditional_eff_isl_ratio_threshold: Annotated[
        float,
        about("isl_bounding, isl_or_load: limit of their part of a prompt", ge=0, unit="FRACTION"),
    ] = 0.7
    conditional_prefill_busy_threshold: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        about(
            "prefill_load, isl_or_load: prefill worker is busy with more tokens to compute "
            "than this multiple of a step's",
            unit="MULTIPLE",
        ),
    ] = None
    conditional_decode_busy_threshold: Annotated[
        Annotated[float, Meta(gt=0, le=1)] | None,
        about(
            "limit of a decode worker's block usage; above it, it computes none", unit="FRACTION"
        ),
    ] = None


class CompletionConfig(Struct, frozen=True, kw_only=True):
    """How completion requests are read, tokenized and placed."""

    GROUP: ClassVar[str] = "OpenAI endpoint"

    mode: Annotated[
        Literal["push", "direct"],
        about(
            "push: to the worker that the router chooses; direct: to the one that the request names"
        ),
    ] = "push"
    bodies_limit_bytes: Annotated[
        int, about("size of all bodies of requests in flight together; beyond that, 503", ge=1024)
    ] = 2 * 1024 * 1024 * 1024
    known_tokens: Annotated[
        int, about("size of the cache of tokenized prompts, in tokens", ge=0)
    ] = 8_000_000
    tokenizer: Annotated[
        str,
        about(
            "tokenizer.json or its folder, to tokenize text prompts; for several "
            "models MODEL=PATH,MODEL=PATH; empty: engines tokenize",
            COMMON,
            unit="PATH",
        ),
    ] = ""
    routing_group: Annotated[str, about("routing group to use", min_length=1)] = "default"
    cors_origins: Annotated[
        str,
        about(
            "origins whose pages may call the endpoint from a browser, such as "
            "https://chat.example.com, separated by commas; empty: none",
            unit="ORIGIN,…",
        ),
    ] = ""

    @property
    def origins(self) -> frozenset[bytes]:
        """The origins, as browsers send them. Raises ConfigError."""
        given = [each.strip() for each in self.cors_origins.split(",") if each.strip()]
        if len(given) > MOST_ORIGINS:
            raise ConfigError("cors_origins", f"{len(given)} origins", f"at most {MOST_ORIGINS}")
        return frozenset(_origin(each) for each in given)


class OpenAiConfig(Struct, frozen=True, kw_only=True):
    """The OpenAI endpoint in the router's process."""

    GROUP: ClassVar[str] = "OpenAI endpoint"

    openai_port: Annotated[
        int,
        about("port of an OpenAI endpoint in this process; 0: none", COMMON, ge=0, le=65535),
    ] = 0
    completions: CompletionConfig = CompletionConfig()
    engines: EngineConfig = EngineConfig()
    prefill: PrefillConfig = PrefillConfig()


def _origin(text: str) -> bytes:
    """Return an origin as a browser sends it. Raises ConfigError."""
    found = _ORIGIN.fullmatch(text)
    is_port = found is None or not found["port"] or 1 <= int(found["port"]) <= 65535
    if found is None or not is_port:
        raise ConfigError("cors_origins", repr(text[:256]), "https://host or https://host:port")
    if (found["scheme"], found["port"]) in (("https", "443"), ("http", "80")):
        reason = f"{text!r}: browsers leave out the scheme's own port"
        raise ConfigError("cors_origins", reason, "the origin without it")
    return text.encode()


def check_engines(engines: EngineConfig, prefill: PrefillConfig) -> None:
    """Check settings for unreadable files and contradictions. Raises ConfigError."""
    check_readable("engine_token_file", engines.engine_token_file)
    policy = prefill.conditional_disagg
    if policy != "off" and prefill.disaggregation == "off":
        allowed = "off, or disaggregation=auto"
        raise ConfigError("conditional_disagg", f"{policy}, without disaggregation", allowed)
    key, needs_load = "conditional_prefill_busy_threshold", policy not in ("off", "isl_bounding")
    if needs_load and prefill.conditional_prefill_busy_threshold is None:
        raise ConfigError(key, f"missing, with {policy}", "a part of a step's tokens, such as 2")
