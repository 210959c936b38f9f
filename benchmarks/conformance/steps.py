"""The step language: what engines do, what happens to them, and what a router is then asked.

A scenario is data. Its token ids are small numbers; the player gives every scenario token ids of
its own, so that all of them can be played to one router at the same time.
"""

from typing import Any

from msgspec import Struct

BLOCK_SIZE = 4
"""Tokens, of every engine in the corpus."""

Event = Any
"""An engine event as it goes into msgpack: a map, an array, or what should not be one."""


class Prompt(Struct, frozen=True):
    """What a request brings."""

    token_ids: tuple[int, ...]
    lora_name: str | None = None
    cache_salt: str | None = None


class Publish(Struct, frozen=True, tag=True):
    """An engine publishes one batch.

    `rank`: of the batch; None leaves it out. `arrives`: false for a batch that is numbered and kept
    for replay, but reaches nobody: a dropped message, or one sent before anybody reconnected.
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
    """An engine dies and comes back at its address: an empty cache, numbers from 0 again."""

    engine: int = 0


class CloseReplay(Struct, frozen=True, tag=True):
    """An engine's replay socket goes away; its events go on."""

    engine: int = 0


class RestartRouter(Struct, frozen=True, tag=True):
    """The router is killed with SIGKILL and started again as before; engines stay silent."""


class Ask(Struct, frozen=True, tag=True):
    """How many leading blocks of a prompt does each engine hold, on whichever tier?

    `cached_blocks`: the truth, by engine; the oracle must come to the same.
    """

    prompt: Prompt
    cached_blocks: tuple[int, ...]


Step = Publish | PublishBytes | Restart | CloseReplay | RestartRouter | Ask


class EngineSpec(Struct, frozen=True):
    """One engine of a scenario.

    `replays_topic`: its replays carry the topic, as vLLM's since #45177, or number and
    payload only.
    `reannounces`: its clients may have it report again what it already holds (vLLM's
    `kv_cache_report_mode: full`), so that a second store is no second copy.
    """

    has_replay: bool = True
    replays_topic: bool = True
    reannounces: bool = False


class Scenario(Struct, frozen=True):
    """A stream with questions in between.

    `convention`: why there is no right answer but an agreed one; such a row is shown and not
    scored. `note`: what a reader of the table should know.
    """

    name: str
    group: str
    steps: tuple[Step, ...]
    engines: tuple[EngineSpec, ...] = (EngineSpec(),)
    convention: str = ""
    note: str = ""

    @property
    def restarts_router(self) -> bool:
        return any(isinstance(step, RestartRouter) for step in self.steps)
