"""The core that a recording begins with, and the core that it is told to."""

from collections.abc import Callable, Mapping
from random import Random
from typing import TypeAlias

from msgspec import ValidationError, convert
from msgspec.structs import replace

from router.config import DECISION_SETTINGS, RouterConfig
from router.core import RouterCore
from router.core_settings import CoreSettings
from router.indexer.base import Indexer
from router.indexer.selection import make_indexer
from router.installed_policies import every_policy
from router.recording.core import Record, RecordedCore
from router.recording.errors import RecordingError
from router.recording.format import Header, Setting

_Parts: TypeAlias = tuple[CoreSettings, Callable[[], Indexer], Random]


def decision_settings(config: RouterConfig) -> dict[str, Setting]:
    """What a header has to say of a configuration."""
    return {name: getattr(config, name) for name in DECISION_SETTINGS}


def recorded_core(header: Header, record: Record) -> RecordedCore:
    """The core whose recording begins with this header. Raises RecordingError."""
    return RecordedCore(*_parts(header, {}), record, every_policy())


def replayed_core(header: Header, settings: Mapping[str, Setting]) -> RouterCore:
    """A core like the recorded one, but for these settings. Raises RecordingError."""
    return RouterCore(*_parts(header, settings), every_policy())


def _parts(header: Header, settings: Mapping[str, Setting]) -> _Parts:
    try:
        config = convert({**header.settings, **settings}, RouterConfig)
    except ValidationError as error:
        raise RecordingError("damaged", 1, f"settings: {error}") from error
    index = replace(config.index, multiplier=header.multiplier)
    return config.core, lambda: make_indexer(index), Random(header.seed)
