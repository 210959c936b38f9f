"""Configuration of `kv-router up`."""

from collections.abc import Mapping, Sequence
from typing import Annotated

from msgspec import Meta, Struct

from router.process.logs import LogLevel
from router.process.settings import UP_PREFIX, load


class UpConfig(Struct, frozen=True, kw_only=True):
    """A fleet on one machine."""

    workers: Annotated[int, Meta(ge=1, le=64, description="workers to start")] = 3
    dp_size: Annotated[int, Meta(ge=1, le=64, description="data-parallel ranks of each worker")] = 1
    port: Annotated[
        int,
        Meta(
            ge=0, le=65535, description="port of the router and its dashboard; 0 takes a free one"
        ),
    ] = 8092
    openai_port: Annotated[
        int, Meta(ge=0, le=65535, description="port of the OpenAI endpoint; 0 takes a free one")
    ] = 8000
    data_dir: Annotated[
        str | None,
        Meta(description="folder for the bus's data and all logs; empty: a temporary one"),
    ] = None
    num_blocks: Annotated[int, Meta(ge=256, description="KV blocks of each rank")] = 2048
    host_cache_blocks: Annotated[
        int, Meta(ge=0, description="KV blocks of each rank in host memory; 0: none")
    ] = 0
    disk_cache_blocks: Annotated[
        int,
        Meta(
            ge=0,
            description="KV blocks of each rank on disk, where they outlive the worker; 0: none",
        ),
    ] = 0
    share: Annotated[
        bool, Meta(description="let workers read cached blocks from each other, and demonstrate it")
    ] = False
    disaggregated: Annotated[
        Annotated[str, Meta(pattern="^[1-9][0-9]?:[1-9][0-9]?$")] | None,
        Meta(
            description=(
                "P:D, instead of --workers: P workers compute prompts and D workers decode"
            )
        ),
    ] = None
    demo: Annotated[
        bool, Meta(description="run conversations and show what the router does, before serving")
    ] = True
    stay: Annotated[bool, Meta(description="keep serving until Ctrl-C is pressed")] = True
    log_level: Annotated[LogLevel, Meta(description="log level of this process")] = "warning"

    @property
    def pools(self) -> tuple[int, int]:
        """How many workers compute prompts for others, and how many there are besides."""
        if self.disaggregated is None:
            return 0, self.workers
        prefill, _, decode = self.disaggregated.partition(":")
        return int(prefill), int(decode)


def load_up_config(arguments: Sequence[str], environment: Mapping[str, str]) -> UpConfig:
    """The configuration of `up`. Raises ConfigError."""
    return load(UpConfig, arguments, environment, UP_PREFIX)
