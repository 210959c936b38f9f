"""Conversion of cluster objects to worker registrations."""

from collections.abc import Iterator, Mapping
from ipaddress import ip_address
from typing import Any

import msgspec
from msgspec import Struct

from router.discovery.kubernetes.objects import EndpointSlice, Pod
from router.errors import InvalidFieldError
from router.protocol.values import UNREADABLE
from router.protocol.workers import WorkerRegistration

ANNOTATION = "kv-router/worker"
OWNER = "kubernetes:"
"""The prefix of `stable_routing_id` of discovered workers."""


class Found(Struct, frozen=True):
    """An engine found in the cluster.

    `said`: what annotations of its pod say of it; empty without any. `port`: that of its server, in
    a pool; `index`: the position of the port among those of the pool.
    """

    name: str
    ip: str
    is_ready: bool
    is_ending: bool
    said: str = ""
    port: int = 0
    index: int = 0


def found_in(each: Pod | EndpointSlice) -> Iterator[Found]:
    """Yield the engines of an object that have an address."""
    if isinstance(each, Pod):
        if each.status.pod_ip:
            yield found_pod(each)
        return
    for endpoint in each.endpoints or ():
        target = endpoint.target_ref
        for ip in endpoint.addresses[:1]:
            conditions = endpoint.conditions
            is_ending = conditions.terminating is True
            name = target.name if target is not None and target.name else ip
            yield Found(name, ip, conditions.ready is not False, is_ending)


def found_pod(pod: Pod) -> Found:
    """Return a pod as an engine, with the registration in its annotation."""
    status, metadata = pod.status, pod.metadata
    is_ready = any(each.type == "Ready" and each.status == "True" for each in status.conditions)
    is_ending = metadata.deletion_timestamp is not None or status.phase in ("Failed", "Succeeded")
    said = metadata.annotations.get(ANNOTATION, "")
    return Found(metadata.name, status.pod_ip, is_ready, is_ending, said)


def registration(template: str, namespace: str, found: Found, worker_id: int) -> WorkerRegistration:
    """Return the registration of an engine: the template, overridden by its pod's annotation.

    Raises InvalidFieldError.
    """
    fields = {**_fields("discovery_worker", template, found)}
    if found.said:
        fields |= _fields(f"annotation {ANNOTATION}", found.said, found)
    fields = {"stable_routing_id": f"{OWNER}{namespace}/{found.name}", **fields}
    try:
        text = msgspec.json.encode({**fields, "worker_id": worker_id})
        return msgspec.json.decode(text, type=WorkerRegistration)
    except UNREADABLE as error:
        raise InvalidFieldError(f"worker {found.name}", str(error), "as POST /workers") from error


def check_template(template: str) -> None:
    """Raise InvalidFieldError for a template that yields no valid registration."""
    registration(template, "namespace", Found("name", "10.0.0.1", True, False), 0)


def _fields(where: str, text: str, found: Found) -> Mapping[str, Any]:
    allowed = "a JSON object with fields of POST /workers, but worker_id"
    said = text.replace("{ip}", _in_url(found.ip)).replace("{name}", found.name)
    try:
        fields = msgspec.json.decode(said, type=dict[str, Any])
    except UNREADABLE as error:
        raise InvalidFieldError(where, str(error), allowed) from error
    unknown = {*fields} - {*WorkerRegistration.__struct_fields__} | {*fields} & {"worker_id"}
    if unknown:
        raise InvalidFieldError(where, f"unknown: {', '.join(sorted(unknown))}", allowed)
    return fields


def _in_url(ip: str) -> str:
    try:
        return f"[{ip}]" if ip_address(ip).version == 6 else ip
    except ValueError as error:
        raise InvalidFieldError("ip", repr(ip), "an address") from error
