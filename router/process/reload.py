"""SIGHUP: the configuration, read again while the process runs.

    the same flags and variables, the file as it is now ─▶ what differs ─┬─▶ LIVE: counts at once
                                                                         └─▶ else: needs a restart

What cannot be used changes nothing, and says why.
"""

import logging
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from msgspec import Struct, structs

from router.errors import ConfigError
from router.process.effective import effective
from router.process.logs import log_to_stderr
from router.process.settings import Loaded

T = TypeVar("T", bound=Struct)

log = logging.getLogger(__name__)

LIVE = frozenset(
    {"log_level", "log_format", "body_limit_bytes", "body_timeout_s", "max_requests", "drain_s"}
)
"""Settings that are looked at whenever they matter. All others are built into what runs."""


class Reloader(Generic[T]):
    """Reads the configuration again when it is called. `load` raises ConfigError; `apply` gets what
    counts from now on, and where each setting comes from; `reread` is for files that settings name.
    """

    def __init__(
        self,
        loaded: Loaded[T],
        load: Callable[[], Loaded[T]],
        apply: Callable[[Loaded[T]], None],
        reread: Callable[[], list[str]],
    ) -> None:
        self._current = loaded
        self._load = load
        self._apply = apply
        self._reread = reread

    def __call__(self) -> None:
        """Read it, and say what changed."""
        try:
            loaded = self._load()
        except ConfigError as error:
            log.error("reload: nothing is changed: %s", error)
            return
        before, after = self._current.config, loaded.config
        names = after.__struct_fields__
        changed = [name for name in names if _of(before, name) != _of(after, name)]
        live = [name for name in changed if name in LIVE]
        self._change(loaded, live)
        for name in changed:
            note = "" if name in LIVE else "; that needs a restart"
            log.warning("reload: %s%s", _told(name, before, after), note)
        for each in self._reread():
            log.info("reload: %s", each)
        if not changed:
            log.info("reload: no setting has changed")

    def _change(self, loaded: Loaded[T], live: list[str]) -> None:
        values = {name: _of(loaded.config, name) for name in live}
        sources = dict(self._current.sources)
        for name in live:
            sources.pop(name, None)
            if name in loaded.sources:
                sources[name] = loaded.sources[name]
        config = structs.replace(self._current.config, **values)
        self._current = Loaded(config, sources)
        if {"log_level", "log_format"} & set(live):
            log_to_stderr(_of(config, "log_level"), _of(config, "log_format"))
        self._apply(self._current)


def _of(config: Struct, name: str) -> Any:
    return getattr(config, name)


def _told(name: str, before: Struct, after: Struct) -> str:
    """As `/config` shows it: without secrets."""
    was, now = (effective(each, {})[name].value for each in (before, after))
    return f"{name}: {was!r} is now {now!r}"
