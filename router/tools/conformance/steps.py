"""The step language: actions of engines, faults, and the questions that a router is then asked.

A scenario is data. The player gives every scenario token ids of its own, so that all of them can be
played to one router at the same time.
"""

from typing import Any

from msgspec import Struct

BLOCK_SIZE = 32
"""Tokens per block of every engine in the corpus: the smallest of vLLM on a CPU."""

Event = Any
"""An engine event before msgpack: a map, an array, or something else, if it is malformed."""


class Salt(Struct, frozen=True):
    """A cache salt among the extra keys of an event. Its form depends on the system (`Marks`)."""

    value: str


class Image(Struct, frozen=True):
    """The hash of an image among the extra keys of an event, 64 hex digits at most."""

    digest: str


class Marks(Struct, frozen=True):
    """The form in which a system's own front end hands salts and image hashes to its engines.

    The engine publishes them as it received them. `salt_prefix`: before each salt.
    `image_digits`: leading digits of an image's hash that are kept; the others become 0.
    """

    salt_prefix: str = ""
    image_digits: int = 64

    def written(self, key: Any) -> Any:
        """Return an extra key as an engine behind this system publishes it."""
        match key:
            case Salt(value):
                return f"{self.salt_prefix}{value}"
            case Image(digest):
                return digest[: self.image_digits].ljust(64, "0")
            case [*parts]:
                return [self.written(part) for part in parts]
        return key


class Prompt(Struct, frozen=True):
    """The prompt of a request, with what distinguishes its blocks from those of equal tokens."""

    token_ids: tuple[int, ...]
    lora_name: str | None = None
    cache_salt: str | None = None


class Publish(Struct, frozen=True, tag=True):
    """An engine publishes one batch.

    `rank`: of the batch; None omits it. `arrives`: False for a batch that is numbered and kept
    for replay, but is not received: a dropped message, or one sent before routers reconnect.
    """

    events: tuple[Event, ...]
    engine: int = 0
    rank: int | None = 0
    arrives: bool = True


class PublishBytes(Struct, frozen=True, tag=True):
    """An engine publishes a payload that is no batch; it takes a number like any other."""

    payload: bytes
    engine: int = 0


class Restart(Struct, frozen=True, tag=True):
    """An engine dies and returns at its address: an empty cache, numbers from 0 again."""

    engine: int = 0


class CloseReplay(Struct, frozen=True, tag=True):
    """An engine's replay socket closes; its events continue."""

    engine: int = 0


class RestartRouter(Struct, frozen=True, tag=True):
    """The router is killed with SIGKILL and started again as before; engines stay silent."""


class Ask(Struct, frozen=True, tag=True):
    """A question: how many leading blocks of a prompt each engine holds, on any tier.

    `cached_blocks`: the truth, by engine. The model of the engine must come to the same.
    """

    prompt: Prompt
    cached_blocks: tuple[int, ...]


Step = Publish | PublishBytes | Restart | CloseReplay | RestartRouter | Ask


class EngineSpec(Struct, frozen=True):
    """One engine of a scenario.

    `kind`: vllm or sglang, whose rules of clearing differ. `replays_topic`: its replays have the
    topic, as vLLM's since #45177, or number and payload only. `reannounces`: its clients may let it
    report again what it already holds (vLLM's `kv_cache_report_mode: full`), so that a second store
    is no second copy. `is_hybrid`: some of its layers keep less than full attention; questions then
    state the engine's own count, as the model of the engine knows full attention only.
    `chunk_tokens`: the span of its chunked local attention, which no event contains.
    """

    kind: str = "vllm"
    has_replay: bool = True
    replays_topic: bool = True
    reannounces: bool = False
    is_hybrid: bool = False
    chunk_tokens: int | None = None


class Scenario(Struct, frozen=True):
    """A stream with questions in between.

    `cause`: the behaviour that it tries. Scenarios of one cause count once: they are right if all
    of them are. By default a scenario is a cause of its own. `convention`: the reason why any
    answer is a matter of agreement; `unknowable`: the reason why no router can know the answer.
    Neither is scored. `note`: a remark for readers of the table.
    """

    name: str
    group: str
    steps: tuple[Step, ...]
    engines: tuple[EngineSpec, ...] = (EngineSpec(),)
    cause: str = ""
    convention: str = ""
    unknowable: str = ""
    note: str = ""

    @property
    def restarts_router(self) -> bool:
        """True if the router is killed in it."""
        return any(isinstance(step, RestartRouter) for step in self.steps)

    @property
    def root_cause(self) -> str:
        """The cause; its name if it states none."""
        return self.cause or self.name

    @property
    def is_scored(self) -> bool:
        """True if there is an answer that a router can know."""
        return not (self.convention or self.unknowable)
