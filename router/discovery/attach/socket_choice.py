"""The event sockets to connect to: as the engine names them, or guesses that must be proved.

Of the addresses that an engine listens on, wildcards are reached at the URL's host. Addresses of
other hosts are followed only if that is allowed, because an engine could otherwise direct this
process to any address.
"""

from urllib.parse import urlsplit

from msgspec import Struct

from router.discovery.attach import sentences
from router.discovery.attach.engine_server import ObservedServer
from router.discovery.attach.engine_url import EngineUrl
from router.discovery.attach.event_sockets import RankSockets
from router.discovery.attach.versions import NAMES_SOCKETS, version_of
from router.publisher.batch_order.address import rank_endpoint

WILDCARDS = frozenset({"*", "0.0.0.0", "::"})  # noqa: S104 - compared, not bound
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})

GUESSED_PORTS = (5557, 5556)
"""The customary first ports of vLLM's events: its documentation's, and llm-d's."""


class SocketChoice(Struct, frozen=True):
    """Sockets by rank, and a clause about them. `is_guess`: to be used only if they are proved."""

    sockets: dict[int, RankSockets]
    clause: str
    is_guess: bool = False


def socket_choices(
    engine: EngineUrl, seen: ObservedServer, *, follows_others: bool, may_guess: bool
) -> list[SocketChoice]:
    """Return the sockets to try, in order; the last choice is no guess.

    `follows_others`: sockets on other hosts than the URL's are accepted; `may_guess`: they can be
    proved.
    """
    if engine.events is not None:
        ranks = range(max(seen.rank_count, 1))
        given = {rank: _given(engine, rank) for rank in ranks}
        return [SocketChoice(given, sentences.GIVEN_EVENTS)]
    if seen.has_prefix_caching is False:
        return [SocketChoice({}, sentences.CACHING_OFF)]
    if not seen.generates:
        return [SocketChoice({}, "")]
    if seen.sockets is None:
        return _unnamed(engine, seen, may_guess=may_guess)
    if not seen.sockets:
        return [SocketChoice({}, sentences.no_events(seen.engine))]
    return _named(engine, seen.sockets, follows_others=follows_others, may_guess=may_guess)


def _unnamed(engine: EngineUrl, seen: ObservedServer, *, may_guess: bool) -> list[SocketChoice]:
    version = version_of(seen.version)
    is_old = seen.engine == "vllm" and (version is None or version < NAMES_SOCKETS)
    ports = GUESSED_PORTS if is_old and may_guess else ()
    guesses = [_guess(engine, port, max(seen.rank_count, 1)) for port in ports]
    return [*guesses, SocketChoice({}, sentences.unnamed_events(engine, seen, ports))]


def _guess(engine: EngineUrl, port: int, rank_count: int) -> SocketChoice:
    first = f"tcp://{engine.bracketed_host}:{port}"
    found = {rank: RankSockets(rank_endpoint(first, rank, "events")) for rank in range(rank_count)}
    return SocketChoice(found, f"events found at {first}, which it does not name", is_guess=True)


def _named(
    engine: EngineUrl, named: dict[int, RankSockets], *, follows_others: bool, may_guess: bool
) -> list[SocketChoice]:
    found = {}
    for rank, each in named.items():
        reached = _reached(engine, each.events, follows_others=follows_others)
        if reached is None:
            return _elsewhere(engine, named, may_guess=may_guess)
        replay = each.replay and _reached(engine, each.replay, follows_others=follows_others)
        load = each.load and _reached(engine, each.load, follows_others=follows_others)
        found[rank] = RankSockets(reached, replay or None, each.topic, load or None)
    return [SocketChoice(found, sentences.with_replay(found))]


def _elsewhere(
    engine: EngineUrl, named: dict[int, RankSockets], *, may_guess: bool
) -> list[SocketChoice]:
    """Return the choices for sockets on another host.

    An engine that binds a free port names one address of its machine, whose name may be another one
    than the URL's: then the port is open at the URL's host too.
    """
    first = next(iter(named.values())).events
    last = SocketChoice({}, sentences.events_elsewhere(engine, first))
    here = {rank: _at_host(engine, each) for rank, each in named.items()}
    if not may_guess or not all(each.events for each in here.values()):
        return [last]
    clause = f"events found at the ports of {engine.host}, though it names {first}"
    return [SocketChoice(here, clause, is_guess=True), last]


def _at_host(engine: EngineUrl, each: RankSockets) -> RankSockets:
    def moved(address: str | None) -> str | None:
        port = _host_and_port(address)[1] if address else None
        return f"tcp://{engine.bracketed_host}:{port}" if port else None

    return RankSockets(moved(each.events) or "", moved(each.replay), each.topic, moved(each.load))


def _given(engine: EngineUrl, rank: int) -> RankSockets:
    events, replay = engine.events or "", engine.replay
    return RankSockets(
        rank_endpoint(events, rank, "events"),
        None if replay is None else rank_endpoint(replay, rank, "replay"),
    )


def _host_and_port(address: str) -> tuple[str, int | None]:
    """Return host and port of a TCP address; no port if it is none."""
    try:
        parts = urlsplit(address)
        host, port = parts.hostname or "*", parts.port
    except ValueError:
        return "", None
    return (host, port) if parts.scheme == "tcp" and port else ("", None)


def _reached(engine: EngineUrl, address: str, *, follows_others: bool) -> str | None:
    """Return the address to connect to; None if it is not to be reached, or not followed."""
    host, port = _host_and_port(address)
    if port is None:
        return None
    if host in WILDCARDS:
        return f"tcp://{engine.bracketed_host}:{port}"
    is_same = host == engine.host or (host in _LOOPBACK and engine.host in _LOOPBACK)
    return address if is_same or follows_others else None
