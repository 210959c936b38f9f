"""Which engines' sockets may be read: well-formed, reachable from here, and not public.

Whoever can read an engine's event socket reads the tokens of its prompts, for the engine asks
nobody who he is. So an address that the whole internet can reach is more likely a mistake.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

from router.errors import InvalidFieldError
from router.protocol.workers import WorkerRegistration
from router.publisher.engine_address import rank_endpoint

RESOLVE_S = 1.0
"""How long a name may take to be resolved; one that takes longer is let pass, as unknown ones."""

_NOT_PUBLIC = "an address of a private network; any, where allow_public_engines is set"


async def check_endpoints(registration: WorkerRegistration, *, allow_public: bool) -> None:
    """Raise InvalidFieldError for the first endpoint that will not do."""
    for field, endpoint in _endpoints(registration):
        rank_endpoint(endpoint, 0, field)
        if not endpoint.startswith("tcp://"):
            continue
        for address in await _addresses(urlsplit(endpoint).hostname or ""):
            if address.is_unspecified:
                reason = f"{endpoint!r} is where an engine listens, not where it can be reached"
                raise InvalidFieldError(field, reason, "its host's address", status=422)
            if address.is_global and not allow_public:
                reason = f"{endpoint!r} is public, and an engine's events contain its prompts"
                raise InvalidFieldError(field, reason, _NOT_PUBLIC, status=422)


def _endpoints(registration: WorkerRegistration) -> Iterator[tuple[str, str]]:
    """Field and endpoint; empty ones are none."""
    for field in ("kv_events_endpoint", "replay_endpoint"):
        if endpoint := getattr(registration, field):
            yield field, endpoint
    for field in ("kv_events_endpoints", "replay_endpoints", "load_endpoints"):
        for dp_rank, endpoint in (getattr(registration, field) or {}).items():
            if endpoint:
                yield f"{field}.{dp_rank}", endpoint


async def _addresses(host: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """What a host's name stands for; nothing, where nobody knows it yet."""
    try:
        return [ipaddress.ip_address(host.partition("%")[0])]
    except ValueError:
        pass
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(RESOLVE_S):
            found = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, TimeoutError, UnicodeError):
        return []
    return [ipaddress.ip_address(str(each[4][0]).partition("%")[0]) for each in found]
