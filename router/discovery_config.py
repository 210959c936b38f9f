"""Configuration of whom a router finds by itself; `--help` prints it."""

from typing import Annotated, Literal

from msgspec import Meta

from router.observing_config import ObservingConfig

ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"

VLLM = (
    '{"endpoint": "http://{ip}:8000", "kv_events_endpoint": "tcp://{ip}:5557", '
    '"replay_endpoint": "tcp://{ip}:5657", "topic": "kv@", "block_size": 16}'
)


class DiscoveryConfig(ObservingConfig, frozen=True, kw_only=True):
    """Which pods of a Kubernetes cluster are engines, and where theirs can be heard."""

    discovery: Annotated[
        Literal["none", "pods", "endpointslices"],
        Meta(description="find engines in Kubernetes: none, pods or endpointslices"),
    ] = "none"
    discovery_selector: Annotated[
        str,
        Meta(
            max_length=1024,
            description=(
                "label selector of the engines, such as app=vllm; required with discovery"
            ),
        ),
    ] = ""
    discovery_worker: Annotated[
        str,
        Meta(
            max_length=16_384,
            description=(
                "how each engine is registered: JSON for POST /workers, with {ip} and "
                "{name}; the pod annotation kv-router/worker overrides single fields"
            ),
        ),
    ] = VLLM
    discovery_namespace: Annotated[
        str,
        Meta(
            pattern="^[a-z0-9-]{0,63}$",
            description="Kubernetes namespace of the engines; empty: this pod's",
        ),
    ] = ""
    discovery_api_url: Annotated[
        str,
        Meta(
            pattern="^$|^https?://[^/]+$",
            description="URL of the Kubernetes API server; empty: this cluster's",
        ),
    ] = ""
    discovery_token_file: Annotated[
        str,
        Meta(
            description=("file with a token for the API server, read at every request; empty: none")
        ),
    ] = f"{ACCOUNT}/token"
    discovery_ca_file: Annotated[
        str,
        Meta(
            description=(
                "PEM file of certificate authorities for the API server; empty: the system's"
            )
        ),
    ] = f"{ACCOUNT}/ca.crt"
    discovery_max_workers: Annotated[
        int,
        Meta(
            ge=1,
            le=65_536,
            description=(
                "engines registered at most; further ones, in the order of their names, are not"
            ),
        ),
    ] = 1024
    discovery_unready_s: Annotated[
        float, Meta(ge=0, description="an engine that is not ready for this long is unregistered")
    ] = 10.0
    discovery_timeout_s: Annotated[
        float, Meta(gt=0, le=60, description="time for the API server to answer")
    ] = 10.0
