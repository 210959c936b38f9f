"""Checks of the endpoints: the kind of socket, and the networks that can reach it."""

import ipaddress
from collections.abc import Iterator

from router.tools.doctor.findings import Finding, events_flag, ok, warning, wrong
from router.tools.doctor.observed_engine import ObservedEngine
from router.tools.doctor.ports import ObservedPort

_WANTED = {"events": ("PUB", "XPUB"), "replay": ("ROUTER",)}
_EXPOSED = "every event carries the prompt's tokens, and ZMQ has no authentication"
_PRIVATE = (
    "bind the engine's sockets to a private address, or close the ports to others; a router "
    "takes public ones only with --allow-public-engines"
)


def port_findings(seen: ObservedEngine) -> Iterator[Finding]:
    """Yield the findings on both endpoints."""
    yield from _findings("events", seen.events_port, seen)
    if seen.replay_port is not None:
        yield from _findings("replay", seen.replay_port, seen)


def _findings(role: str, port: ObservedPort, seen: ObservedEngine) -> Iterator[Finding]:
    check = f"{role} endpoint"
    if port.outcome != "zmtp":
        yield _absent(check, port, seen)
    elif port.mechanism != "NULL":
        yield wrong(
            check,
            f"{port.endpoint} requires the security mechanism {port.mechanism}",
            "the router connects without one, as engines do",
            "switch it off on the engine's sockets, and protect the network instead",
        )
    elif port.socket_type not in (None, *_WANTED[role]):
        yield _misplaced(check, role, port)
    else:
        yield ok(check, f"{port.endpoint}: a ZMQ {port.socket_type or 'socket'} responds")
        yield from _exposure(role, port)


def _absent(check: str, port: ObservedPort, seen: ObservedEngine) -> Finding:
    config = seen.config
    text = {
        "unresolved": f"the host of {port.endpoint} has no address: {port.detail}",
        "refused": f"nothing listens at {port.endpoint}",
        "unreachable": f"{port.endpoint} cannot be reached: {port.detail}",
        "silent": f"{port.endpoint} accepts connections and sends nothing",
        "http": f"{port.endpoint} is an HTTP server",
        "other": f"{port.endpoint} has another protocol (it sends {port.detail!r})",
    }[port.outcome]
    if port.outcome == "http":
        fix = "give the port of kv-events-config here; the HTTP port belongs in --url"
    elif port.outcome in ("unresolved", "unreachable"):
        fix = "give the host by which this machine reaches the engine, and open the port to it"
    else:
        fix = events_flag(seen.engine, config.zmq, config.replay)
    return wrong(check, text, "without it the router receives no events of this engine", fix)


def _misplaced(check: str, role: str, port: ObservedPort) -> Finding:
    wanted = _WANTED[role][0]
    other = "replay" if role == "events" else "events"
    if port.socket_type in _WANTED[other]:
        return wrong(
            check,
            f"{port.endpoint} is the {other} socket (a {port.socket_type})",
            f"{role} come from a {wanted} socket, and this one would never send any",
            "exchange --zmq and --replay",
        )
    return wrong(
        check,
        f"{port.endpoint} is a {port.socket_type} socket, not a {wanted}",
        "it sends a single response per request" if role == "replay" else
        "only a PUB socket sends live events",
        f"have the engine bind a {wanted} there; {port.socket_type} is not what engines use",
    )  # fmt: skip


def _exposure(role: str, port: ObservedPort) -> Iterator[Finding]:
    check = f"{role} exposure"
    addresses = [ipaddress.ip_address(_plain(each)) for each in port.addresses]
    public = [address for address in addresses if address.is_global]
    if any(address.is_unspecified for address in addresses):
        text = f"{port.endpoint} is an address to listen on, not one to connect to"
        yield wrong(check, text, "a router rejects it: it may run elsewhere", "give its host")
    elif public:
        text = f"{port.endpoint} is at a public address ({public[0]})"
        yield warning(check, text, _EXPOSED, _PRIVATE)
    elif port.also_at:
        text = f"the port is open on all of this machine's addresses (also at {port.also_at})"
        fix = "bind it to 127.0.0.1 if the router runs here; else close it to others"
        yield warning(check, text, _EXPOSED, fix)


def _plain(address: str) -> str:
    """Return the address without the zone of a link-local address."""
    return address.partition("%")[0]
