"""What an agent beside an engine takes for true of it: what it was told to, and what it learned."""

from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import asdict, replace

from router.errors import ConfigError
from router.publisher.metrics_dialects import EngineFacts

ASSUMED_BATCHED_TOKENS = 2048
"""vLLM's own default; no metric of its tells."""

_SIZES = ("block_size", "total_kv_blocks", "max_num_batched_tokens")


class SettledFacts(Struct, frozen=True):
    """All that has to be known before a worker can be announced."""

    model_name: str
    block_size: int
    total_kv_blocks: int
    max_num_batched_tokens: int


def settle(given: EngineFacts, told: EngineFacts) -> SettledFacts | None:
    """What is true, or None while it is not all known. Raises ConfigError where a size was given,
    and the engine says another.
    """
    for name in _SIZES:
        wanted, real = getattr(given, name), getattr(told, name)
        if None not in (wanted, real) and wanted != real:
            problem = f"{wanted} was set, and the engine says {real}"
            raise ConfigError(name, problem, f"{real}, or nothing: then it is learned")
    block_size = given.block_size or told.block_size
    total_kv_blocks = given.total_kv_blocks or told.total_kv_blocks
    if block_size is None or total_kv_blocks is None:
        return None
    tokens = given.max_num_batched_tokens or told.max_num_batched_tokens
    return SettledFacts(
        given.model_name or told.model_name or "default",
        block_size,
        total_kv_blocks,
        tokens or ASSUMED_BATCHED_TOKENS,
    )


def unknown(given: EngineFacts, told: EngineFacts) -> Iterator[str]:
    """The sizes that have to be known, and are not."""
    for name in ("block_size", "total_kv_blocks"):
        if getattr(given, name) is None and getattr(told, name) is None:
            yield name


def differences(before: EngineFacts, now: EngineFacts) -> Iterator[str]:
    """How an engine differs from what it said before; what it does not say does not differ."""
    for name, old in asdict(before).items():
        new = getattr(now, name)
        if None not in (old, new) and old != new:
            yield f"{name} {old} is now {new}"


def merged(before: EngineFacts, now: EngineFacts) -> EngineFacts:
    """What it says now, and before of what it does not say now."""
    new = {name: value for name, value in asdict(now).items() if value is not None}
    return replace(before, **new)


class LearnedFacts:
    """What was set, and what the engine has said of itself until now. `told`: the latter."""

    __slots__ = ("_given", "_served", "told")

    def __init__(self, given: EngineFacts) -> None:
        self._given = given
        self._served: str | None = None
        self.told = EngineFacts()

    @property
    def model_name(self) -> str:
        """What routers call the model, as far as it is known."""
        return self._given.model_name or self.told.model_name or "default"

    def hear(self, told: EngineFacts) -> str:
        """How the engine differs from what it said before; empty where it is the same one."""
        changes = ", ".join(differences(self.told, told))
        self.told = told if changes else merged(self.told, told)
        return changes

    def settled(self) -> SettledFacts | None:
        """What is true, or None while it is not all known. Raises ConfigError for a size that is
        not the engine's, and where a model was named and has become another.
        """
        given, told = self._given.model_name, self.told.model_name
        if None not in (given, told) and self._served not in (None, told):
            problem = f"{given} was set when the engine served {self._served}; now it is {told}"
            raise ConfigError("model_name", problem, "the model that is served")
        self._served = told or self._served
        return settle(self._given, self.told)

    def unknown(self) -> list[str]:
        """The sizes that have to be known, and are not."""
        return list(unknown(self._given, self.told))
