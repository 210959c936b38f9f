"""The address of an engine: http://a:8000[;events=…][;replay=…][;role=…][;eagle_groups=…][;p2p=…]."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import get_args
from urllib.parse import SplitResult, urlsplit

from msgspec import Struct, ValidationError, convert

from router.errors import InvalidFieldError
from router.protocol.catalogue import vllm_p2p_endpoint
from router.protocol.hybrid import HybridSettings
from router.protocol.values import Role
from router.publisher.batch_order.address import rank_endpoint
from router.runtime.process.settings import id_of_name

_OPTIONS = ("events", "replay", "role", "eagle_groups", "p2p")
_PLACES: Mapping[str, Callable[[str, int, str], str]] = {
    "events": rank_endpoint,
    "replay": rank_endpoint,
    "p2p": vllm_p2p_endpoint,
}
_NO_GROUPS = "none"
MOST_CHARACTERS = 900
"""Limit of an engine's address."""


class EngineUrl(Struct, frozen=True):
    """The address of an engine.

    `events`, `replay`: of its first rank, if the caller names them. `role`: None: aggregated.
    `eagle_groups`: numbers of groups as in a registration, joined by `+`, or `none`; None: unknown.
    `p2p`: host and port of the side channel of its first rank's P2P tier, if it has one.
    """

    url: str
    events: str | None = None
    replay: str | None = None
    role: Role | None = None
    eagle_groups: str | None = None
    p2p: str | None = None

    @property
    def hybrid(self) -> HybridSettings | None:
        """The settings of a hybrid model in the address; None if it has none."""
        return None if self.eagle_groups is None else _hybrid(self.eagle_groups)

    def block_addresses(self, dp_ranks: Iterable[int]) -> dict[int, list[str]]:
        """Return where each of its ranks gives blocks to others; without those beyond all ports."""
        found: dict[int, list[str]] = {}
        if self.p2p is None:
            return found
        for dp_rank in dp_ranks:
            with suppress(InvalidFieldError):
                found[dp_rank] = [vllm_p2p_endpoint(self.p2p, dp_rank, "p2p")]
        return found

    @property
    def host(self) -> str:
        """The host."""
        return urlsplit(self.url).hostname or ""

    @property
    def bracketed_host(self) -> str:
        """The host as addresses contain it."""
        return f"[{self.host}]" if ":" in self.host else self.host

    @property
    def text(self) -> str:
        """The address as `parsed_url` reads it."""
        given = {name: getattr(self, name) for name in _OPTIONS}
        return self.url + "".join(f";{name}={each}" for name, each in given.items() if each)

    @property
    def worker_id(self) -> int:
        """The id under which it is registered, which follows from the URL."""
        return id_of_name(self.url)


def parsed_url(text: str, field: str) -> EngineUrl:
    """Parse the address of an engine. Raises InvalidFieldError for `field`."""
    url, *options = text.strip().split(";")
    allowed = (
        "http://HOST:PORT or https://HOST:PORT, with ;events=, ;replay=, ;role=, ;eagle_groups= "
        "and ;p2p= if necessary"
    )
    if "@" in url:  # before anything that would repeat the URL
        reason = f"the URL of {url.rpartition('@')[2][:100]!r} contains credentials"
        raise InvalidFieldError(field, reason, "worker_token_file for engines that need a key")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise InvalidFieldError(field, f"{url!r}: {error}", allowed) from error
    if parts.scheme not in ("http", "https") or not parts.hostname or _is_more(parts):
        raise InvalidFieldError(field, repr(url), allowed)
    if len(text) > MOST_CHARACTERS:
        raise InvalidFieldError(field, f"{len(text)} characters", f"at most {MOST_CHARACTERS}")
    given = dict(option.partition("=")[::2] for option in options)
    if not given.keys() <= set(_OPTIONS) or not all(given.values()):
        raise InvalidFieldError(field, repr(text), allowed)
    for name in given.keys() & _PLACES.keys():
        _PLACES[name](given[name], 0, field)
    role = _role(given.get("role"), field)
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    at = host if port is None else f"{host}:{port}"
    try:
        _hybrid(given.get("eagle_groups", _NO_GROUPS))
    except (ValueError, ValidationError):
        reason = f"eagle_groups {given['eagle_groups']!r}"
        raise InvalidFieldError(field, reason, "0, or 1+3, or none") from None
    events, replay, groups, p2p = map(given.get, ("events", "replay", "eagle_groups", "p2p"))
    return EngineUrl(f"{parts.scheme}://{at}", events, replay, role, groups, p2p)


def _hybrid(groups: str) -> HybridSettings:
    numbers = () if groups == _NO_GROUPS else tuple(map(int, groups.split("+")))
    return convert({"eagle_groups": numbers}, HybridSettings)


def _role(name: str | None, field: str) -> Role | None:
    """Return the role of this name. Raises InvalidFieldError for an unknown one."""
    try:
        return None if name is None else convert(name, Role)
    except ValidationError:
        allowed = ", ".join(get_args(Role))
        raise InvalidFieldError(field, f"role {name!r}", allowed) from None


def _is_more(parts: SplitResult) -> bool:
    return parts.path not in ("", "/", "/v1", "/v1/") or bool(parts.query or parts.fragment)
