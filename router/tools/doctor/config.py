"""The settings of `kv-router doctor`, each documented by its annotation."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from msgspec import Meta, Struct

from router.errors import ConfigError
from router.process.settings import DOCTOR_PREFIX, load


class DoctorConfig(Struct, frozen=True, kw_only=True):
    """Which engine, and for how long."""

    zmq: Annotated[
        str,
        Meta(description="event endpoint of one rank (required): tcp://host:port or ipc:///path"),
    ] = ""
    replay: Annotated[str, Meta(description="replay endpoint of that rank; empty: none")] = ""
    topic: Annotated[str, Meta(description="topic prefix that the router would subscribe to")] = ""
    url: Annotated[str, Meta(description="the engine's OpenAI server, http://host:port")] = ""
    model: Annotated[str, Meta(description="model that the engine serves; empty: ask it")] = ""
    block_size: Annotated[
        int,
        Meta(ge=0, le=65_536, description="tokens per block, as configured; 0: as the events say"),
    ] = 0
    engine: Annotated[
        Literal["", "vllm", "sglang", "trtllm"],
        Meta(description="vllm, sglang or trtllm; empty: detect it"),
    ] = ""
    seconds: Annotated[
        float, Meta(gt=0, le=3600, description="how long to listen to live events")
    ] = 10.0
    probe: Annotated[
        bool,
        Meta(
            description=("send a few small requests to --url, and check the events that they cause")
        ),
    ] = False
    json: Annotated[bool, Meta(description="print the findings as JSON")] = False


def load_doctor_config(arguments: Sequence[str], environment: Mapping[str, str]) -> DoctorConfig:
    """From flags, environment and file. Raises ConfigError."""
    config = load(DoctorConfig, arguments, environment, DOCTOR_PREFIX)
    if not config.zmq:
        raise ConfigError("zmq", "missing", "the engine's event endpoint, tcp://host:port")
    if config.probe and not config.url:
        raise ConfigError("probe", "needs --url", "the engine's OpenAI server, http://host:port")
    if config.url and not config.url.startswith(("http://", "https://")):
        raise ConfigError("url", repr(config.url), "http://host:port, or https://…")
    return config
