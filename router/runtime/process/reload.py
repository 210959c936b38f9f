"""Reload of the configuration by SIGHUP, while the process runs.

    the same flags and variables, the current file ─▶ changes ─┬─▶ LIVE: applied at once
                                                               └─▶ else: needs a restart

An unusable configuration changes nothing, and the error is logged.
"""

import logging
from collections.abc import Callable
from typing import Generic, Literal, TypeAlias, TypeVar

from msgspec import Struct

from router.errors import ConfigError
from router.runtime.process.loading import Loaded
from router.runtime.process.logs import log_to_stderr
from router.runtime.process.settings import LIVE, effective, settings_of, with_settings

T = TypeVar("T", bound=Struct)

Outcome: TypeAlias = Literal["applied", "unchanged", "refused"]

log = logging.getLogger(__name__)


class ConfigReloader(Generic[T]):
    """Reloads the configuration when it is called.

    `load` raises ConfigError. `apply` receives the new settings and their sources, and raises
    ConfigError if the process cannot go on with them; then it has changed none. `ended` receives
    the outcome, and reads the files that settings name, unless the configuration was refused.
    """

    def __init__(
        self,
        loaded: Loaded[T],
        load: Callable[[], Loaded[T]],
        apply: Callable[[Loaded[T]], None],
        ended: Callable[[Outcome], list[str]],
    ) -> None:
        self._current = loaded
        self._load = load
        self._apply = apply
        self._ended = ended

    def __call__(self) -> None:
        """Reload the configuration, and log the changes."""
        try:
            loaded = self._load()
        except ConfigError as error:
            self._refuse(error)
            return
        before, after = self._current.config, loaded.config
        pairs = zip(settings_of(before), settings_of(after), strict=True)
        changed = [new for old, new in pairs if new.value != old.value]
        try:
            self._change(loaded, [each.name for each in changed if each.has_mark(LIVE)])
        except ConfigError as error:
            self._refuse(error)
            return
        for each in changed:
            note = "" if each.has_mark(LIVE) else "; takes effect at a restart"
            log.warning("reload: %s%s", _change_text(each.name, before, after), note)
        for what in self._ended("applied" if changed else "unchanged"):
            log.info("reload: %s", what)
        if not changed:
            log.info("reload: no setting changed")

    def _refuse(self, error: ConfigError) -> None:
        log.error("reload failed, no setting changed: %s", error)
        self._ended("refused")

    def _change(self, loaded: Loaded[T], live: list[str]) -> None:
        values = {each.name: each.value for each in settings_of(loaded.config) if each.name in live}
        sources = dict(self._current.sources)
        for name in live:
            sources.pop(name, None)
            if name in loaded.sources:
                sources[name] = loaded.sources[name]
        config = with_settings(self._current.config, values)
        merged = Loaded(config, sources)
        self._apply(merged)
        self._current = merged
        if {"log_level", "log_format"} & set(live):
            now = {each.name: each.value for each in settings_of(config)}
            log_to_stderr(now["log_level"], now["log_format"])


def _change_text(name: str, before: Struct, after: Struct) -> str:
    """Return a line about a change, as `/config` shows values: without secrets."""
    was, now = (effective(each, {})[name].value for each in (before, after))
    return f"{name}: {was!r} is now {now!r}"
