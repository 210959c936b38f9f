"""What custom resources may have, of the fields that we use: of KEDA, of the Prometheus
operator, of the Gateway API, of its Inference Extension and of gateways. They are none of
Kubernetes' own, so their validator knows nothing of them.
"""


def _object(required=(), /, **properties):
    return {
        "type": "object",
        "additionalProperties": False,
        "required": list(required),
        "properties": properties,
    }


_TEXT = {"type": "string", "minLength": 1}
_TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
_DURATION = {"type": "string", "pattern": "^[0-9]+(ms|s|m|h)$"}
_SERVER_SET = dict.fromkeys(("uid", "resourceVersion", "creationTimestamp"), _TEXT)
_METADATA = _object(
    ("name", "namespace"),
    name=_TEXT,
    namespace=_TEXT,
    labels=_TEXTS,
    annotations=_TEXTS,
    **_SERVER_SET,
)
_SELECTOR = _object(("matchLabels",), matchLabels=_TEXTS)
_ENDPOINT = _object(
    ("port",),
    port=_TEXT,
    path={"type": "string", "pattern": "^/"},
    interval=_DURATION,
    authorization=_object(
        ("credentials",), credentials=_object(("name", "key"), name=_TEXT, key=_TEXT)
    ),
)
_RULE = _object(
    ("expr",),
    alert=_TEXT,
    record=_TEXT,
    expr=_TEXT,
    **{"for": _DURATION},
    labels=_TEXTS,
    annotations=_TEXTS,
)
_GROUP = _object(
    ("name", "rules"),
    name=_TEXT,
    interval=_DURATION,
    rules={"type": "array", "minItems": 1, "items": _RULE},
)


def _kind(name, spec, *versions):
    return _object(
        ("apiVersion", "kind", "metadata", "spec"),
        apiVersion={"enum": versions or ("monitoring.coreos.com/v1",)},
        kind={"const": name},
        metadata=_METADATA,
        spec=spec,
    )


def _monitor(name, endpoints):
    listed = {"type": "array", "minItems": 1, "items": _ENDPOINT}
    return _kind(name, _object(("selector", endpoints), selector=_SELECTOR, **{endpoints: listed}))


# ── Gateway API, and its Inference Extension (GIE 1.6, llm-d-router 2026-08) ─────────────────────

_PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
_LABELS = {"type": "object", "minProperties": 1, "maxProperties": 64, "additionalProperties": _TEXT}
_POOL = _kind(
    "InferencePool",
    _object(
        ("selector", "targetPorts"),
        selector=_object(("matchLabels",), matchLabels=_LABELS),
        targetPorts={
            "type": "array",
            "minItems": 1,
            "maxItems": 8,
            "uniqueItems": True,
            "items": _object(("number",), number=_PORT),
        },
        appProtocol={"enum": ["http", "kubernetes.io/h2c"]},
        endpointPickerRef={
            **_object(
                ("name",),
                group={"type": "string"},
                kind=_TEXT,
                name=_TEXT,
                port=_object(("number",), number=_PORT),
                failureMode={"enum": ["FailOpen", "FailClose"]},
            ),
            # A port is required, unless the reference is to another kind than a service.
            "if": {"properties": {"kind": {"const": "Service"}}},
            "then": {"required": ["port"]},
        },
    ),
    "inference.networking.k8s.io/v1",
)
_POOL_REF = _object(("name",), group={"type": "string"}, kind=_TEXT, name=_TEXT)
_ALPHA = ("llm-d.ai/v1alpha2", "inference.networking.x-k8s.io/v1alpha2")
_OBJECTIVE = _kind(
    "InferenceObjective",
    _object(("poolRef",), poolRef=_POOL_REF, priority={"type": "integer", "format": "int32"}),
    *_ALPHA,
)
_MODEL = _object(("value",), type={"const": "Exact"}, value=_TEXT)
_TARGET = _object(
    ("modelRewrite",),
    modelRewrite=_TEXT,
    weight={"type": "integer", "minimum": 1, "maximum": 1_000_000},
)
_REWRITE = _kind(
    "InferenceModelRewrite",
    _object(
        ("poolRef", "rules"),
        poolRef=_POOL_REF,
        rules={
            "type": "array",
            "minItems": 1,
            "items": _object(
                ("targets",),
                matches={"type": "array", "items": _object((), model=_MODEL)},
                targets={"type": "array", "minItems": 1, "items": _TARGET},
            ),
        },
    ),
    *_ALPHA,
)
_REF = _object(
    ("name",), group={"type": "string"}, kind=_TEXT, name=_TEXT, namespace=_TEXT, port=_PORT
)
_ROUTE = _kind(
    "HTTPRoute",
    _object(
        ("parentRefs", "rules"),
        parentRefs={
            "type": "array",
            "minItems": 1,
            "items": _object(("name",), name=_TEXT, namespace=_TEXT, sectionName=_TEXT),
        },
        hostnames={"type": "array", "items": _TEXT},
        rules={
            "type": "array",
            "minItems": 1,
            "items": _object(
                ("backendRefs",),
                matches={
                    "type": "array",
                    "items": _object(
                        ("path",),
                        path=_object(
                            ("type", "value"),
                            type={"enum": ["Exact", "PathPrefix"]},
                            value={"type": "string", "pattern": "^/"},
                        ),
                    ),
                },
                backendRefs={"type": "array", "minItems": 1, "items": _REF},
                timeouts=_object((), request=_DURATION, backendRequest=_DURATION),
            ),
        },
    ),
    "gateway.networking.k8s.io/v1",
)
_LISTENER = _object(
    ("name", "port", "protocol"), name=_TEXT, port=_PORT, protocol={"enum": ["HTTP", "HTTPS"]}
)
_GATEWAY = _kind(
    "Gateway",
    _object(
        ("gatewayClassName", "listeners"),
        gatewayClassName=_TEXT,
        listeners={"type": "array", "minItems": 1, "items": _LISTENER},
    ),
    "gateway.networking.k8s.io/v1",
)
_CLASS = {
    **_kind(
        "GatewayClass",
        _object(("controllerName",), controllerName=_TEXT),
        "gateway.networking.k8s.io/v1",
    )
}
_CLASS["properties"] = {**_CLASS["properties"], "metadata": _object(("name",), name=_TEXT)}
_TLS = _object(("mode",), mode={"const": "SIMPLE"}, insecureSkipVerify={"type": "boolean"})
_DESTINATION = _kind(
    "DestinationRule",
    _object(("host",), host=_TEXT, trafficPolicy=_object((), tls=_TLS)),
    "networking.istio.io/v1",
)
_TARGET_REF = _object(("group", "kind", "name"), group=_TEXT, kind=_TEXT, name=_TEXT)


def _of_gke(name, default):
    spec = _object(("targetRef", "default"), targetRef=_TARGET_REF, default=default)
    return _kind(name, spec, "networking.gke.io/v1")


_HEALTH = _object(
    ("config",),
    config=_object(
        ("type", "httpHealthCheck"),
        type={"const": "HTTP"},
        httpHealthCheck=_object((), requestPath=_TEXT, port=_PORT),
    ),
)

# ── KEDA 2 ───────────────────────────────────────────────────────────────────────────────────────

_COUNT = {"type": "integer", "minimum": 0}
_TRIGGER = _object(
    ("type", "metricType", "metadata"),
    type={"const": "prometheus"},
    metricType={"enum": ["AverageValue", "Value"]},
    metadata=_object(
        ("serverAddress", "threshold", "query"),
        serverAddress=_TEXT,
        threshold=_TEXT,
        query=_TEXT,
        ignoreNullValues={"enum": ["true", "false"]},
    ),
)
_SCALED = _object(
    ("scaleTargetRef", "triggers"),
    scaleTargetRef=_object(("name",), apiVersion=_TEXT, kind=_TEXT, name=_TEXT),
    minReplicaCount=_COUNT,
    maxReplicaCount=_COUNT,
    cooldownPeriod=_COUNT,
    advanced=_object((), horizontalPodAutoscalerConfig=_object((), behavior={"type": "object"})),
    triggers={"type": "array", "minItems": 1, "items": _TRIGGER},
)

SCHEMAS = {
    "ScaledObject": _kind("ScaledObject", _SCALED, "keda.sh/v1alpha1"),
    "ServiceMonitor": _monitor("ServiceMonitor", "endpoints"),
    "PodMonitor": _monitor("PodMonitor", "podMetricsEndpoints"),
    "PrometheusRule": _kind(
        "PrometheusRule", _object(("groups",), groups={"type": "array", "items": _GROUP})
    ),
    "InferencePool": _POOL,
    "InferenceObjective": _OBJECTIVE,
    "InferenceModelRewrite": _REWRITE,
    "HTTPRoute": _ROUTE,
    "Gateway": _GATEWAY,
    "GatewayClass": _CLASS,
    "DestinationRule": _DESTINATION,
    "HealthCheckPolicy": _of_gke("HealthCheckPolicy", _HEALTH),
    "GCPBackendPolicy": _of_gke("GCPBackendPolicy", _object((), timeoutSec={"type": "integer"})),
}
