"""The facts on an engine next to the agent: configured ones, and those it reports."""

from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import asdict, replace

from router.errors import ConfigError
from router.publisher.engine_metrics.dialects import EngineLimits

ASSUMED_BATCHED_TOKENS = 2048
"""vLLM's default; none of its metrics contains it."""

_SIZES = ("block_size", "total_kv_blocks", "max_num_batched_tokens")


class ReconciledFacts(Struct, frozen=True):
    """All facts that an announcement needs."""

    model_name: str
    block_size: int
    total_kv_blocks: int
    max_num_batched_tokens: int


def reconcile(configured: EngineLimits, reported: EngineLimits) -> ReconciledFacts | None:
    """Return the facts, or None if they are incomplete.

    Raises ConfigError if a size is configured and the engine reports another one.
    """
    for name in _SIZES:
        wanted, real = getattr(configured, name), getattr(reported, name)
        if None not in (wanted, real) and wanted != real:
            problem = f"{wanted} was set, but the engine reports {real}"
            raise ConfigError(name, problem, f"{real}, or unset: then it is read from the engine")
    block_size = configured.block_size or reported.block_size
    total_kv_blocks = configured.total_kv_blocks or reported.total_kv_blocks
    if block_size is None or total_kv_blocks is None:
        return None
    tokens = configured.max_num_batched_tokens or reported.max_num_batched_tokens
    return ReconciledFacts(
        configured.model_name or reported.model_name or "default",
        block_size,
        total_kv_blocks,
        tokens or ASSUMED_BATCHED_TOKENS,
    )


def unknown(configured: EngineLimits, reported: EngineLimits) -> Iterator[str]:
    """Yield the required sizes that are unknown."""
    for name in ("block_size", "total_kv_blocks"):
        if getattr(configured, name) is None and getattr(reported, name) is None:
            yield name


def differences(before: EngineLimits, now: EngineLimits) -> Iterator[str]:
    """Yield the changes of an engine's facts; missing facts are not changes."""
    for name, old in asdict(before).items():
        new = getattr(now, name)
        if None not in (old, new) and old != new:
            yield f"{name} {old} is now {new}"


def merged(before: EngineLimits, now: EngineLimits) -> EngineLimits:
    """Return the current facts, completed by earlier ones."""
    new = {name: value for name, value in asdict(now).items() if value is not None}
    return replace(before, **new)


class LearnedFacts:
    """The configured facts, and those reported by the engine so far, in `reported`."""

    __slots__ = ("_configured", "_served", "reported")

    def __init__(self, configured: EngineLimits) -> None:
        self._configured = configured
        self._served: str | None = None
        self.reported = EngineLimits()

    @property
    def model_name(self) -> str:
        """The name of the model for routers, as far as it is known."""
        return self._configured.model_name or self.reported.model_name or "default"

    def record(self, reported: EngineLimits) -> str:
        """Apply the reported facts; return the changes, or an empty string if there are none."""
        changes = ", ".join(differences(self.reported, reported))
        self.reported = reported if changes else merged(self.reported, reported)
        return changes

    def settled(self) -> ReconciledFacts | None:
        """Return the facts, or None if they are incomplete.

        Raises ConfigError for a size that is not the engine's, and if the model is named in the
        settings and the engine now serves another one.
        """
        configured, reported = self._configured.model_name, self.reported.model_name
        if None not in (configured, reported) and self._served not in (None, reported):
            problem = (
                f"{configured} was set when the engine served {self._served}; now it is {reported}"
            )
            raise ConfigError("model_name", problem, "the model that is served")
        self._served = reported or self._served
        return reconcile(self._configured, self.reported)

    def unknown(self) -> list[str]:
        """Return the required sizes that are unknown."""
        return list(unknown(self._configured, self.reported))
