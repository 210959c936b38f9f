"""What the Prometheus operator takes of the fields that we use: its resources are none of
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
_METADATA = _object(("name", "namespace"), name=_TEXT, namespace=_TEXT, labels=_TEXTS)
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


def _kind(name, spec):
    return _object(
        ("apiVersion", "kind", "metadata", "spec"),
        apiVersion={"const": "monitoring.coreos.com/v1"},
        kind={"const": name},
        metadata=_METADATA,
        spec=spec,
    )


def _monitor(name, endpoints):
    listed = {"type": "array", "minItems": 1, "items": _ENDPOINT}
    return _kind(name, _object(("selector", endpoints), selector=_SELECTOR, **{endpoints: listed}))


SCHEMAS = {
    "ServiceMonitor": _monitor("ServiceMonitor", "endpoints"),
    "PodMonitor": _monitor("PodMonitor", "podMetricsEndpoints"),
    "PrometheusRule": _kind(
        "PrometheusRule", _object(("groups",), groups={"type": "array", "items": _GROUP})
    ),
}
