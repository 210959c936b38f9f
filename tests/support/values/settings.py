"""The settings of a configuration by name, for tests of what a flag or a variable sets."""

from types import SimpleNamespace

from router.runtime.process.settings import settings_of


def flat(config):
    """The settings of all sections as attributes."""
    return SimpleNamespace(**{each.name: each.value for each in settings_of(config)})
