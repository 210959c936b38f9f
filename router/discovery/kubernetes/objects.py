"""The fields of Kubernetes objects that discovery reads; others are ignored."""

from typing import Annotated, TypeAlias

from msgspec import Meta, Raw, Struct, field


class Metadata(Struct, frozen=True, rename="camel"):
    """Metadata of any object.

    `creation_timestamp`: RFC 3339 in UTC, so that texts are in the order of times.
    `deletion_timestamp`: set once the object is terminating.
    """

    name: str = ""
    uid: str = ""
    resource_version: str = ""
    creation_timestamp: str = ""
    deletion_timestamp: str | None = None
    annotations: dict[str, str] = {}
    labels: dict[str, str] = {}


class Condition(Struct, frozen=True):
    """A condition of a pod."""

    type: str = ""
    status: str = ""


class PodStatus(Struct, frozen=True):
    """The status of a pod."""

    phase: str = ""
    pod_ip: str = field(default="", name="podIP")
    conditions: list[Condition] = []


class Pod(Struct, frozen=True):
    """A pod."""

    metadata: Metadata
    status: PodStatus = PodStatus()


class EndpointConditions(Struct, frozen=True):
    """Conditions of an endpoint; absent ones count as true, except `terminating`."""

    ready: bool | None = None
    terminating: bool | None = None


class Target(Struct, frozen=True):
    """The object that an endpoint belongs to."""

    name: str = ""


class Endpoint(Struct, frozen=True, rename="camel"):
    """An endpoint of a slice."""

    addresses: list[str] = []
    conditions: EndpointConditions = EndpointConditions()
    target_ref: Target | None = None


class EndpointSlice(Struct, frozen=True):
    """A part of a service's endpoints."""

    metadata: Metadata
    endpoints: list[Endpoint] | None = None


# ── An InferencePool, and what belongs to it (Gateway API Inference Extension) ───────────────────

Port: TypeAlias = Annotated[int, Meta(ge=1, le=65535)]


class Selector(Struct, frozen=True, rename="camel"):
    """Labels that pods must have."""

    match_labels: Annotated[dict[str, str], Meta(min_length=1, max_length=64)]


class TargetPort(Struct, frozen=True):
    """A port of every pod: an endpoint, which is a data-parallel rank if there are several."""

    number: Port


class PickerReference(Struct, frozen=True):
    """The service that picks the endpoints of a pool."""

    name: str = ""


class InferencePoolSpec(Struct, frozen=True, rename="camel"):
    """The specification of a pool."""

    selector: Selector
    target_ports: Annotated[list[TargetPort], Meta(min_length=1, max_length=8)]
    app_protocol: str = "http"
    endpoint_picker_ref: PickerReference | None = None


class InferencePool(Struct, frozen=True):
    """The pods that serve a model, and their ports."""

    metadata: Metadata
    spec: InferencePoolSpec


class PoolReference(Struct, frozen=True):
    """The pool that an object belongs to. Without a kind it is an InferencePool."""

    name: str = ""
    kind: str = "InferencePool"


class InferenceObjectiveSpec(Struct, frozen=True, rename="camel"):
    """The specification of an objective. `priority`: None counts as 0."""

    pool_ref: PoolReference = PoolReference()
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None


class InferenceObjective(Struct, frozen=True):
    """A name that requests give, with its priority."""

    metadata: Metadata
    spec: InferenceObjectiveSpec = InferenceObjectiveSpec()


class ModelMatch(Struct, frozen=True):
    """A model's name."""

    value: str = ""


class RewriteMatch(Struct, frozen=True):
    """A condition of a rule: the model, whose name is exactly this."""

    model: ModelMatch | None = None


class RewriteTarget(Struct, frozen=True, rename="camel"):
    """A model to use. `weight`: None if no target of the rule has one."""

    model_rewrite: Annotated[str, Meta(min_length=1, max_length=256)]
    weight: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None


class RewriteRule(Struct, frozen=True):
    """A rule. `matches`: any of them; none: every model."""

    matches: list[RewriteMatch] = []
    targets: list[RewriteTarget] = []


class InferenceModelRewriteSpec(Struct, frozen=True, rename="camel"):
    """The specification of a rewrite."""

    pool_ref: PoolReference = PoolReference()
    rules: list[RewriteRule] = []


class InferenceModelRewrite(Struct, frozen=True):
    """Rules that replace the models of requests."""

    metadata: Metadata
    spec: InferenceModelRewriteSpec = InferenceModelRewriteSpec()


ClusterObject: TypeAlias = (
    Pod | EndpointSlice | InferencePool | InferenceObjective | InferenceModelRewrite
)


class ListMetadata(Struct, frozen=True, rename="camel"):
    """Metadata of a page of a list.

    `continue_`: the token of the next page; empty on the last page.
    """

    resource_version: str = ""
    continue_: str = field(default="", name="continue")


class Page(Struct, frozen=True):
    """A page of a list."""

    metadata: ListMetadata
    items: list[Raw] = []


class Change(Struct, frozen=True):
    """A line of a watch; if `type` is ERROR, its object is a status."""

    type: str
    object: Raw


class Status(Struct, frozen=True):
    """The reason why a request or a watch failed."""

    code: int = 0
    message: str = ""
