"""Configuration of `kv-router up`."""

from collections.abc import Mapping, Sequence
from typing import Annotated

from msgspec import Meta, Struct

from router.runtime.process.loading import load
from router.runtime.process.logs import LogLevel
from router.runtime.process.settings import UP_PREFIX, about


class UpConfig(Struct, frozen=True, kw_only=True):
    """Settings of a fleet on one machine."""

    workers: Annotated[int, about("workers to start", ge=1, le=64)] = 3
    dp_size: Annotated[
        int, about("data-parallel ranks of each worker", ge=1, le=64, unit="RANKS")
    ] = 1
    port: Annotated[
        int, about("port of the router and its dashboard; 0 takes a free one", ge=0, le=65535)
    ] = 8092
    openai_port: Annotated[
        int, about("port of the OpenAI endpoint; 0 takes a free one", ge=0, le=65535)
    ] = 8000
    data_dir: Annotated[
        str | None, about("folder for the bus's data and all logs; empty: a temporary one")
    ] = None
    num_blocks: Annotated[int, about("KV blocks of each rank", ge=256)] = 2048
    host_cache_blocks: Annotated[
        int, about("KV blocks of each rank in host memory; 0: none", ge=0)
    ] = 0
    disk_cache_blocks: Annotated[
        int, about("KV blocks of each rank on disk, where they outlive the worker; 0: none", ge=0)
    ] = 0
    share: Annotated[
        bool, about("workers read cached blocks from each other, with a demonstration")
    ] = False
    disaggregated: Annotated[
        Annotated[str, Meta(pattern="^[1-9][0-9]?:[1-9][0-9]?$")] | None,
        about(
            "P:D, in place of --workers: P prefill workers and D decode workers",
            unit="P:D",
            form="P:D, such as 1:2, each from 1 to 99",
        ),
    ] = None
    vllm: Annotated[
        str | None,
        about(
            "a model's folder or name: starts two vLLM engines with it, in place of --workers, and "
            "attaches them by URL; needs `vllm` beside this Python or in PATH",
            unit="MODEL",
        ),
    ] = None
    vllm_args: Annotated[
        str,
        about("further arguments of `vllm serve`, as a shell would split them", unit="ARGUMENTS"),
    ] = ""
    demo: Annotated[
        bool, about("run conversations that show the router's decisions, before serving")
    ] = True
    stay: Annotated[bool, about("keep serving until Ctrl-C is pressed")] = True
    log_level: Annotated[LogLevel, about("log level of this process")] = "warning"

    @property
    def pools(self) -> tuple[int, int]:
        """The number of prefill workers, and of other workers."""
        if self.disaggregated is None:
            return 0, self.workers
        prefill, _, decode = self.disaggregated.partition(":")
        return int(prefill), int(decode)


def load_up_config(arguments: Sequence[str], environment: Mapping[str, str]) -> UpConfig:
    """Return the configuration of `up`. Raises ConfigError."""
    return load(UpConfig, arguments, environment, UP_PREFIX)
