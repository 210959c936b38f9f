"""Sessions and users that callers name in headers and fields, as agents send them today.

    headers, fields ─▶ SIGNALS, in order ─▶ session: the rank of its prefix, by name or as a hint
                                        └─▶ fair share: the unit of fairness within the tenant

A caller chooses all of these values. They are a preference and a place in the tenant's own queue,
never an identity, a quota or a salt. A key is a hash of tenant, kind and value; values are neither
stored nor logged, and the router receives the keys alone. Only a session that is named by
`x-session-id` or `x-dynamo-session-id` binds its rank, under the caller's own name, which other
programs may use at the router. All others are hints (`session_is_hint`).

Sources: llm-d-router `agentidentity`; Dynamo `protocols/agents.rs`; TensorRT-LLM
`serve/conversation_id.py`; vLLM 0.31; SMG; the APIs of OpenAI and Anthropic.
"""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import Raw, Struct

from router.forward.headers import DYNAMO_SESSION_ID, SESSION_ID, Pairs
from router.protocol.values import UNREADABLE

MOST_BYTES = 256
"""The limit of a value; a longer one is ignored, since it names no session."""

MOST_SEEN = 4096
"""Limit of remembered ids that were seen once; beyond it, the oldest is dropped."""

_KEY_BYTES = 16
_BEHIND_SESSION = "_session_"
_FINAL = b"x-dynamo-session-final"
_YES = ("1", "true", "yes")

Part: TypeAlias = Literal["before", "behind"]
"""A part of a value that is split at `_session_`."""


class Source(Struct, frozen=True):
    """A header, or a field of the body: `path` names it, and fields within it."""

    header: bytes = b""
    path: tuple[str, ...] = ()
    part: Part | None = None


class Signal(Struct, frozen=True):
    """A row of the table: the first present source of each column counts.

    `kind`: the name space of its values. `binds`: the session is named for the router.
    `needs_second`: an id that may be one request's counts as a session once it was seen before.
    """

    kind: str
    session: tuple[Source, ...] = ()
    fair_share: tuple[Source, ...] = ()
    binds: bool = False
    needs_second: bool = False


def _headers(*names: bytes) -> tuple[Source, ...]:
    return tuple(Source(name) for name in names)


def _field(*path: str, part: Part | None = None) -> tuple[Source, ...]:
    return (Source(path=path, part=part),)


SIGNALS: tuple[Signal, ...] = (
    Signal(
        "fairness",
        fair_share=_headers(b"x-llm-d-inference-fairness-id", b"x-gateway-inference-fairness-id"),
    ),
    Signal(
        "session",
        _headers(SESSION_ID),
        _headers(b"x-parent-session-id", SESSION_ID),
        binds=True,
    ),
    Signal(
        "dynamo",
        _headers(DYNAMO_SESSION_ID),
        _headers(b"x-dynamo-parent-session-id", DYNAMO_SESSION_ID),
        binds=True,
    ),
    Signal(
        "claude-code",
        _headers(b"x-claude-code-agent-id", b"x-claude-code-session-id"),
        _headers(b"x-claude-code-session-id"),
    ),
    Signal(
        "codex",
        _headers(b"thread-id", b"session-id", b"session_id"),
        _headers(b"session-id", b"session_id", b"x-codex-parent-thread-id", b"thread-id"),
    ),
    Signal(
        "session",
        _headers(b"x-session-affinity"),
        _headers(b"x-parent-session-id", b"x-session-affinity"),
    ),
    Signal(
        "deepseek",
        _headers(b"x-deepseek-harness-session-id"),
        _headers(b"x-deepseek-harness-parent-session-id", b"x-deepseek-harness-session-id"),
    ),
    Signal("conversation", _headers(b"x-multi-turn-session-id")),
    Signal("conversation", _field("conversation_params", "conversation_id")),
    Signal("correlation", _headers(b"x-correlation-id"), needs_second=True),
    Signal("engine", _field("session_id")),
    Signal("engine", _field("vllm_xargs", "session_id")),
    Signal("routing-key", _headers(b"x-smg-routing-key")),
    Signal("token", _headers(b"x-session-token")),
    Signal(
        "messages-user",
        _field("metadata", "user_id", part="behind"),
        _field("metadata", "user_id", part="before"),
    ),
    Signal("prompt-cache", _field("prompt_cache_key")),
    Signal("user", fair_share=_field("safety_identifier")),
    Signal("user", fair_share=_field("user")),
)
"""The table, in order of precedence: the first row with a value decides each column.

Parents come first in the column of fairness, so that the agents that an agent starts share its
queue; they have prefixes of their own, and therefore sessions of their own.
"""

_SOURCES = [each for row in SIGNALS for each in (*row.session, *row.fair_share)]
_NAMES = frozenset((_FINAL, *(each.header for each in _SOURCES if each.header)))
_FIELDS = frozenset(each.path[0] for each in _SOURCES if each.path)


class SeenIds:
    """Keys of ids that were seen at least once, the oldest first."""

    __slots__ = ("_seen",)

    def __init__(self) -> None:
        self._seen: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._seen)

    def was_seen(self, key: str) -> bool:
        """Return whether a key was seen before, and remember it."""
        is_known = key in self._seen
        self._seen.pop(key, None)
        self._seen[key] = None
        if len(self._seen) > MOST_SEEN:
            del self._seen[next(iter(self._seen))]
        return is_known


class SessionKeys(Struct, frozen=True):
    """The session of a request and the unit of fairness within its tenant, each None if unknown.

    `name`: a session as the caller named it for the router. `hint`: the key of an inferred one.
    `is_final`: the request is the session's last.
    """

    name: str | None = None
    hint: str | None = None
    fair_share_id: str | None = None
    is_final: bool = False


NO_KEYS = SessionKeys()


def session_keys(
    headers: Pairs, fields: Mapping[str, Raw], tenant: str | None, seen: SeenIds
) -> SessionKeys:
    """Return the keys of a request. O(headers); nothing else is read if there is no signal.

    `seen`: the ids of earlier requests, of which those that need a second request are remembered.
    """
    given: dict[bytes, bytes] = {}
    for name, value in headers:
        if name in _NAMES:
            given.setdefault(name, value)
    if not given and _FIELDS.isdisjoint(fields):
        return NO_KEYS
    values = _Values(given, fields)
    session, hint = _session(values, tenant, seen)
    is_final = given.get(_FINAL, b"").decode("latin-1").strip().lower() in _YES
    return SessionKeys(session, hint, _fair_share(values, tenant), is_final)


def _session(values: "_Values", tenant: str | None, seen: SeenIds) -> tuple[str | None, str | None]:
    """Return a session that is named for the router, or else the key of a hint."""
    for row in SIGNALS:
        value = values.first(row.session)
        if value is None:
            continue
        if row.binds:
            return value, None
        key = _key(tenant, row.kind, value)
        if not row.needs_second or seen.was_seen(key):
            return None, key
    return None, None


def _fair_share(values: "_Values", tenant: str | None) -> str | None:
    for row in SIGNALS:
        value = values.first(row.fair_share)
        if value is not None:
            return _key(tenant, row.kind, value)
    return None


class _Values(Struct):
    """The present values of a request; fields are parsed once, when they are needed."""

    headers: Mapping[bytes, bytes]
    fields: Mapping[str, Raw]
    parsed: dict[str, Any] = {}

    def first(self, sources: Sequence[Source]) -> str | None:
        """Return the first valid value of these sources, or None."""
        for source in sources:
            value = self._value(source)
            if value:
                return value
        return None

    def _value(self, source: Source) -> str | None:
        if source.header:
            value = self.headers.get(source.header)
            is_value = value is not None and len(value) <= MOST_BYTES
            return value.decode("latin-1").strip() if is_value and value else None
        return _part(self._field(source.path), source.part)

    def _field(self, path: tuple[str, ...]) -> str | None:
        name = path[0]
        if name not in self.fields:
            return None
        if name not in self.parsed:
            self.parsed[name] = _parsed(bytes(self.fields[name]), has_more=len(path) > 1)
        value = self.parsed[name]
        for each in path[1:]:
            value = value.get(each) if isinstance(value, dict) else None
        is_value = isinstance(value, str) and len(value.encode()) <= MOST_BYTES
        return value.strip() if is_value else None


MOST_FIELD_BYTES = 16_384
"""The limit of a field's size; a larger one is not read for a session."""


def _parsed(written: bytes, *, has_more: bool) -> Any:
    """Return a field's value if it may hold a session's name, else None."""
    begins = b"{" if has_more else b'"'
    if len(written) > MOST_FIELD_BYTES or not written.startswith(begins):
        return None
    try:
        return msgspec.json.decode(written)
    except UNREADABLE:
        return None


def _part(value: str | None, part: Part | None) -> str | None:
    if value is None or part is None:
        return value
    before, _, behind = value.partition(_BEHIND_SESSION)
    return before if part == "before" else behind


def _key(tenant: str | None, kind: str, value: str) -> str:
    """Return the key of a value: its kind and a hash, which names the tenant as well."""
    parts = ["" if tenant is None else f"tenant {tenant}", kind, value]
    digest = blake2b(msgspec.msgpack.encode(parts), digest_size=_KEY_BYTES)
    return f"{kind}:{digest.hexdigest()}"
