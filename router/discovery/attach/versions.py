"""The versions of engines that tests have seen, by the events and metrics recorded of them."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeAlias

from router.publisher.engine_metrics.dialects import EngineKind

Version: TypeAlias = tuple[int, int]

ENGINE_NAMES: Mapping[str | None, str] = MappingProxyType(
    {"vllm": "vLLM", "sglang": "SGLang", "trtllm": "TensorRT-LLM"}
)

TESTED: Mapping[EngineKind, tuple[Version, Version]] = MappingProxyType(
    {"vllm": ((0, 9), (0, 33)), "sglang": ((0, 5), (0, 5)), "trtllm": ((1, 0), (1, 2))}
)
"""The first and the last version of each engine that was tested, both included."""

NAMES_SOCKETS: Version = (0, 31)
"""The first version of vLLM that names its event sockets."""


def version_of(text: str | None) -> Version | None:
    """Return the first two numbers of a version. Returns None if it has no two."""
    numbers = (text or "").removeprefix("v").split(".")[:2]
    if len(numbers) < 2 or not all(each.isascii() and each.isdecimal() for each in numbers):
        return None
    return int(numbers[0][:9]), int(numbers[1][:9])


def untested(engine: EngineKind | None, text: str | None) -> str | None:
    """Return the reason why an engine's events may not be understood; None if there is none.

    A version that is not known is no reason: SGLang and development builds may not name one.
    """
    version = version_of(text)
    if engine is None or version is None:
        return None
    first, last = TESTED[engine]
    if first <= version <= last:
        return None
    span = f"{first[0]}.{first[1]} to {last[0]}.{last[1]}"
    return (
        f"{ENGINE_NAMES[engine]} {version[0]}.{version[1]} has not been tested ({span} have): "
        "its events may mean something else"
    )
