"""Constructors of the core that is recorded, and of the core for a replay."""

from collections.abc import Mapping
from random import Random

from router.config.core import make_core
from router.config.router import RouterConfig
from router.core.core import RouterCore
from router.errors import ConfigError
from router.recording.format import Header, RecordingError, Setting
from router.recording.recorded_core import Record, RecordedCore
from router.runtime.process.loading import checked
from router.runtime.process.settings import configured, settings_of


def recorded_core(header: Header, record: Record) -> RouterCore:
    """Return the core for a recording with this header. Raises RecordingError."""
    return RecordedCore(replayed_core(header, {}), record).core


def replayed_core(header: Header, settings: Mapping[str, Setting]) -> RouterCore:
    """Return a core like the recorded one, with changed settings. Raises RecordingError."""
    try:
        config = config_of({**header.settings, **settings})
        return make_core(config, Random(header.seed), multiplier=header.multiplier)
    except ConfigError as error:
        raise RecordingError("damaged", 1, f"settings: {error}") from error


def config_of(settings: Mapping[str, Setting]) -> RouterConfig:
    """Return a configuration with recorded settings; unknown ones are ignored.

    Raises ConfigError.
    """
    names = {each.name for each in settings_of(RouterConfig())}
    known = {name: value for name, value in settings.items() if name in names}
    return configured(RouterConfig, **checked(RouterConfig, known, "recorded"))
