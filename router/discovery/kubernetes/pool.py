"""The meaning of an InferencePool's objects: endpoints, priorities and model names. Pure.

Sources: GIE `pkg/epp/datastore`, `api/v1`; llm-d-router `pkg/epp/requestcontrol/director.go`.
"""

from collections.abc import Iterable, Iterator
from ipaddress import ip_address

from msgspec import Struct

from router.discovery.kubernetes.found import Found, found_pod
from router.discovery.kubernetes.objects import (
    InferenceModelRewrite,
    InferenceObjective,
    InferencePool,
    Metadata,
    Pod,
    PoolReference,
    RewriteRule,
    RewriteTarget,
)
from router.errors import InvalidFieldError
from router.protocol.catalogue import VLLM_P2P, vllm_p2p_endpoint
from router.publisher.batch_order.address import rank_endpoint

ACTIVE_PORTS = ("inference.networking.k8s.io/active-ports", "llm-d.ai/active-ports")
"""Annotations of a pod with the ports, of the pool's, that it serves at."""
EVENTS_PORT, REPLAY_PORT = "kv-router/events-port", "kv-router/replay-port"
P2P_PORT = "kv-router/p2p-port"
"""Annotations of a pod with the ports of its first rank's event sockets, and of the side channel of
its vLLM's P2P tier; each further endpoint of the pod has the next one."""

ROLE = "llm-d.ai/role"
"""The label of a pod with the work that it does; without one it does all."""

_POOL_KIND = "InferencePool"
_KEYS = {"events": EVENTS_PORT, "replay": REPLAY_PORT, "p2p": P2P_PORT, "role": ROLE}
_ROLES = {"prefill": "prefill", "encode-prefill": "prefill", "encode": "encode"}
"""Roles that are not decode workers; others may prefill for themselves too."""


def endpoints_of(pool: InferencePool, pod: Pod) -> Iterator[Found]:
    """Yield an engine for each port of a pod that is of the pool and has an address.

    A pod that was listed for an earlier selector is none of the pool.
    """
    base = found_pod(pod)
    if not base.ip or not pool.spec.selector.match_labels.items() <= pod.metadata.labels.items():
        return
    active = _active_ports(pod.metadata)
    numbers = list(dict.fromkeys(port.number for port in pool.spec.target_ports))
    for index, number in enumerate(numbers):
        if active is None or number in active:
            yield Found(
                f"{base.name}-rank-{index}",
                base.ip,
                base.is_ready,
                base.is_ending,
                said=_said(pod.metadata),
                port=number,
                index=index,
            )


def _active_ports(metadata: Metadata) -> set[int] | None:
    """Return the ports that a pod restricts itself to; None: all of the pool's."""
    for name in ACTIVE_PORTS:
        if name in metadata.annotations:
            parts = (each.strip() for each in metadata.annotations[name].split(","))
            return {int(each) for each in parts if each.isascii() and each.isdigit()}
    return None


def _said(metadata: Metadata) -> str:
    """Return the ports of sockets and the role that a pod names, as options of a URL."""
    found = {n: metadata.annotations.get(_KEYS[n], "").strip() for n in ("events", "replay", "p2p")}
    found["role"] = _ROLES.get(metadata.labels.get(ROLE, ""), "")
    return ";".join(f"{name}={value}" for name, value in found.items() if value)


def engine_url(found: Found) -> str:
    """Return an engine's URL, as `parsed_url` reads it. Raises InvalidFieldError."""
    try:
        address = ip_address(found.ip)
    except ValueError as error:
        raise InvalidFieldError("podIP", repr(found.ip), "an address") from error
    host = f"[{address}]" if address.version == 6 else str(address)
    options = (each.partition("=")[::2] for each in found.said.split(";") if each)
    said = (f";{name}={_option(name, value, host, found)}" for name, value in options)
    return f"http://{host}:{found.port}{''.join(said)}"


def _option(name: str, value: str, host: str, found: Found) -> str:
    """Return the value of an option of an engine's URL. Raises InvalidFieldError."""
    if name == "role":
        if value == "encode":
            raise InvalidFieldError(ROLE, "an encoder generates nothing", "another role")
        return value
    if name not in _KEYS or not (value.isascii() and value.isdigit()):
        raise InvalidFieldError(_KEYS.get(name, EVENTS_PORT), repr(found.said), "a port")
    if name == "p2p":
        place = vllm_p2p_endpoint(f"{host}:{value}", found.index, P2P_PORT)
        return place.removeprefix(VLLM_P2P)
    return rank_endpoint(f"tcp://{host}:{value}", found.index, _KEYS[name])


class Rewrites(Struct, frozen=True):
    """Rules that replace models: by the exact name, and for every other name."""

    exact: dict[str, RewriteRule]
    generic: RewriteRule | None = None

    def model(self, asked: str, draw: float) -> str | None:
        """Return the model to use for one that was asked for; None: the same. O(targets).

        `draw`: in [0, 1); it chooses among weighted targets.
        """
        rule = self.exact.get(asked, self.generic)
        return None if rule is None else _drawn(rule.targets, draw)


NO_REWRITES = Rewrites({})


def _drawn(targets: list[RewriteTarget], draw: float) -> str | None:
    """Return the target that a draw falls on. Those without a weight count if none has one."""
    is_weighted = any(each.weight is not None for each in targets)
    shares = [(each.weight or 0) if is_weighted else 1 for each in targets]
    rest = draw * sum(shares)
    for each, share in zip(targets, shares, strict=True):
        if rest < share:
            return each.model_rewrite
        rest -= share
    return None


def rewrites_for(pool: str, objects: Iterable[InferenceModelRewrite]) -> Rewrites:
    """Return the rules of a pool: the oldest object's first, then in the order of its list."""
    own = [each for each in objects if _is_of(each.spec.pool_ref, pool)]
    own.sort(key=lambda each: (each.metadata.creation_timestamp, each.metadata.name))
    exact: dict[str, RewriteRule] = {}
    generic: RewriteRule | None = None
    for rule in (rule for each in own for rule in each.spec.rules):
        names = [each.model.value for each in rule.matches if each.model is not None]
        for name in names:
            exact.setdefault(name, rule)
        if not names:
            generic = generic or rule
    return Rewrites(exact, generic)


def priorities_for(pool: str, objects: Iterable[InferenceObjective]) -> dict[str, int]:
    """Return the priorities of a pool's objectives by name."""
    own = (each for each in objects if _is_of(each.spec.pool_ref, pool))
    return {each.metadata.name: each.spec.priority or 0 for each in own}


def _is_of(reference: PoolReference, pool: str) -> bool:
    return reference.name == pool and reference.kind == _POOL_KIND
