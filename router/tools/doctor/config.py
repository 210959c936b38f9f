"""The settings of `kv-router doctor`, each documented by its annotation."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from msgspec import Struct
from msgspec.structs import replace

from router.errors import ConfigError
from router.runtime.process.command_line import as_url
from router.runtime.process.loading import load
from router.runtime.process.settings import DOCTOR_PREFIX, about


class DoctorConfig(Struct, frozen=True, kw_only=True):
    """The engine to examine, and the duration."""

    zmq: Annotated[
        str,
        about(
            "event endpoint of one rank, tcp://host:port or ipc:///path; empty: --url is asked",
            unit="ENDPOINT",
        ),
    ] = ""
    replay: Annotated[str, about("replay endpoint of that rank; empty: none", unit="ENDPOINT")] = ""
    topic: Annotated[
        str, about("topic prefix that the router would subscribe to", unit="TOPIC")
    ] = ""
    url: Annotated[str, about("the engine's OpenAI server, http://host:port")] = ""
    model: Annotated[str, about("the engine's model; empty: from the server", unit="NAME")] = ""
    block_size: Annotated[
        int, about("tokens per block; 0: taken from the events", ge=0, le=65_536)
    ] = 0
    engine: Annotated[
        Literal["", "vllm", "sglang", "trtllm"], about("vllm, sglang or trtllm; empty: detected")
    ] = ""
    seconds: Annotated[
        float, about("duration of the subscription to live events", gt=0, le=3600, unit="SECONDS")
    ] = 10.0
    probe: Annotated[
        bool, about("send a few small requests to --url, and check the events that they cause")
    ] = False
    json: Annotated[bool, about("print the findings as JSON")] = False


def load_doctor_config(arguments: Sequence[str], environment: Mapping[str, str]) -> DoctorConfig:
    """Return the settings from flags, environment and file. Raises ConfigError."""
    config = load(DoctorConfig, arguments, environment, DOCTOR_PREFIX)
    if ":" in config.url:
        config = replace(config, url=as_url(config.url))
    if not config.zmq and not config.url:
        allowed = "the engine's event endpoint, tcp://host:port, or --url of its server"
        raise ConfigError("zmq", "missing", allowed)
    if config.probe and not config.url:
        raise ConfigError("probe", "needs --url", "the engine's OpenAI server, http://host:port")
    if config.url and not config.url.startswith(("http://", "https://")):
        raise ConfigError("url", repr(config.url), "http://host:port, or https://…")
    return config
