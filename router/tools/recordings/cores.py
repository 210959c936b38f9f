"""Constructors of the core that is recorded, and of the core for a replay."""

from collections.abc import Callable, Mapping
from random import Random
from typing import TypeAlias

from msgspec.structs import replace

from router.config.router import DECISION_SETTINGS, RouterConfig
from router.core.core import RouterCore
from router.core.settings import CoreSettings
from router.errors import ConfigError
from router.indexer.base import Indexer
from router.indexer.factory import make_indexer
from router.recording.format import Header, RecordingError, Setting
from router.recording.recorded_core import Record, RecordedCore
from router.runtime.process.settings import checked, configured, settings_of
from router.service.extras import every_policy

_Parts: TypeAlias = tuple[CoreSettings, Callable[[], Indexer], Random]


def decision_settings(config: RouterConfig) -> dict[str, Setting]:
    """Return the settings that a header must contain."""
    return {s.name: s.value for s in settings_of(config) if s.name in DECISION_SETTINGS}


def recorded_core(header: Header, record: Record) -> RouterCore:
    """Return the core for a recording with this header. Raises RecordingError."""
    return RecordedCore(replayed_core(header, {}), record).core


def replayed_core(header: Header, settings: Mapping[str, Setting]) -> RouterCore:
    """Return a core like the recorded one, with changed settings. Raises RecordingError."""
    try:
        return RouterCore(*_parts(header, settings), every_policy())
    except ConfigError as error:
        raise RecordingError("damaged", 1, f"settings: {error}") from error


def _parts(header: Header, settings: Mapping[str, Setting]) -> _Parts:
    """Return the parts of a core. Raises ConfigError."""
    names = {each.name for each in settings_of(RouterConfig())}
    given = {**header.settings, **settings}
    known = {name: value for name, value in given.items() if name in names}
    config = configured(RouterConfig, **checked(RouterConfig, known, "recorded"))
    index = replace(config.index_settings, multiplier=header.multiplier)
    return config.core, lambda: make_indexer(index), Random(header.seed)
