"""The Helm chart, rendered offline; run as a program, this writes `deploy/manifests`."""

import sys
from pathlib import Path

import yaml

DEPLOY = Path(__file__).parents[3] / "deploy"
CHART = DEPLOY / "chart"
MANIFESTS = DEPLOY / "manifests"
RELEASE = {"name": "kv", "namespace": "kv-router"}
HEAD = "# Rendered from deploy/chart by `make manifests`: change that, not this.\n"

KEPT = {
    "fleet.yaml": {},
    "direct.yaml": {"nats": {"enabled": False}, "discovery": {"enabled": True}},
    "gateway.yaml": {
        "epp": {
            "enabled": True,
            "gateway": {"name": "inference"},
            "callers": [
                {
                    "podSelector": {
                        "matchLabels": {"gateway.networking.k8s.io/gateway-name": "inference"}
                    }
                }
            ],
        },
        "forward": {"enabled": False},
        "router": {"config": {"drain_s": 30}},
    },
    "monitored.yaml": {
        "monitoring": {"enabled": True},
        "router": {"autoscaling": {"enabled": True}},
        "engines": {"autoscaling": {"enabled": True}},
        "indexer": {"enabled": True},
        "redis": {"enabled": True},
        "networkPolicy": {"egress": {"enabled": True}},
    },
}
"""The values of each file of manifests that is kept."""


def _chart():
    """Anew each time: rendering drops, for good, the dependencies that are off."""
    import helm_python  # starts the threads of Go, with which no test process could be forked

    return helm_python.Chart.load(CHART)


def check_values(values):
    """Raise HelmValuesError for values that the chart's schema does not allow."""
    _chart().validate_schema(values)


def rendered(values):
    """Every template with something in it: {path: text}, notes excepted."""
    chart = _chart()
    chart.validate_schema(values)
    templates = chart.render(values, **RELEASE)
    tidy = {path: _tidied(text) for path, text in sorted(templates.items())}
    return {path: text for path, text in tidy.items() if text and not path.endswith(".txt")}


def objects(values):
    """The Kubernetes objects of a release, in order."""
    texts = rendered(values).values()
    return [each for text in texts for each in yaml.load_all(text, yaml.CSafeLoader) if each]


def manifest(values):
    """A release as one file that `kubectl apply` takes."""
    parts = ["---\n" + text.removeprefix("---\n") for text in rendered(values).values()]
    return HEAD + "".join(parts)


def _tidied(text):
    lines = [line.rstrip() for line in text.splitlines()]
    return "".join(f"{line}\n" for line in lines if line)


if __name__ == "__main__":
    MANIFESTS.mkdir(exist_ok=True)
    for name, values in KEPT.items():
        (MANIFESTS / name).write_text(manifest(values))
        sys.stdout.write(f"{MANIFESTS / name}\n")
