"""The routers of one Service, found through its EndpointSlices.

Routers that are not ready yet, and those that are terminating, count too: the former need the
others' reservations to become ready, and the latter hand over their own.
"""

from collections.abc import Callable, Iterable
from random import Random

from prometheus_client import CollectorRegistry

from router.config.router import RouterConfig
from router.discovery.kubernetes.api_server import SLICES, ApiServer, namespace_of
from router.discovery.kubernetes.found import found_in
from router.discovery.kubernetes.objects import EndpointSlice
from router.discovery.kubernetes.watching import WATCH_METRICS, ClusterWatch, Watches
from router.runtime.process.metrics import expose
from router.runtime.security.config import is_ip_address

_SERVICE = "kubernetes.io/service-name"


class PeerWatch:
    """One Service. `tls_name`: the name that certificates of its pods need."""

    def __init__(
        self,
        config: RouterConfig,
        set_addresses: Callable[[Iterable[str]], None],
        registry: CollectorRegistry,
        random: Random,
    ) -> None:
        """Raise ConfigError if the namespace or the API server is unknown.

        `set_addresses`: called with the addresses of the other routers at each change.
        """
        named, _, name = config.peers.router_service.rpartition("/")
        namespace = named or namespace_of(config.cluster)
        self._shown = f"{namespace}/{name}"
        self.tls_name = f"{name}.{namespace}.svc"
        self._set_addresses = set_addresses
        self._own_pod, self._port = config.service.name, config.http.http_port
        chosen = {"labelSelector": f"{_SERVICE}={name}"}
        self._watch: ClusterWatch[EndpointSlice] = ClusterWatch(
            ApiServer(config.cluster, SLICES, namespace, chosen), self._take, random
        )
        expose(registry, "kv_router_replica_discovery_", WATCH_METRICS, Watches(self._watch))

    async def run(self) -> None:
        """Follow the Service until cancelled."""
        await self._watch.run()

    def problems(self) -> list[str]:
        """Return why the routers of the Service are not known, if they are not."""
        if self._watch.is_synced:
            return []
        reason = self._watch.problem or "not listed"
        return [f"the routers of Service {self._shown} may be others by now: {reason}"]

    def _take(self) -> None:
        """Pass on the addresses by pod: in clusters with two IP families each has two slices."""
        by_pod: dict[str, str] = {}
        for _, each in sorted(self._watch.objects.items()):
            for found in found_in(each):
                if found.name != self._own_pod and is_ip_address(found.ip):
                    by_pod.setdefault(found.name, found.ip)
        self._set_addresses(_authority(ip, self._port) for _, ip in sorted(by_pod.items()))


def _authority(ip: str, port: int) -> str:
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"
