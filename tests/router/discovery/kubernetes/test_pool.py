"""What the objects of an InferencePool mean."""

import msgspec
import pytest

from router.discovery.attach.engine_url import parsed_url
from router.discovery.kubernetes.objects import (
    InferenceModelRewrite,
    InferenceObjective,
    InferencePool,
    Pod,
)
from router.discovery.kubernetes.pool import (
    endpoints_of,
    engine_url,
    priorities_for,
    rewrites_for,
)
from router.errors import InvalidFieldError
from support.processes import api_server as made

ACTIVE = "inference.networking.k8s.io/active-ports"


def read(each, kind):
    made.check_object(each)
    return msgspec.convert(each, kind)


def endpoints(*ports, **fields):
    """Name, URL and readiness of the engines of one pod."""
    pool = read(made.pool(*ports), InferencePool)
    pod = msgspec.convert(made.pod("a", **{"ip": "10.0.0.1", **fields}), Pod)
    return [
        (e.name, engine_url(e), e.is_ready and not e.is_ending) for e in endpoints_of(pool, pod)
    ]


def test_each_port_of_a_pod_is_an_engine():
    assert endpoints(8000) == [("a-rank-0", "http://10.0.0.1:8000", True)]
    assert endpoints(8000, 8001) == [
        ("a-rank-0", "http://10.0.0.1:8000", True),
        ("a-rank-1", "http://10.0.0.1:8001", True),
    ]
    assert endpoints(8000, ip="fd00::1") == [("a-rank-0", "http://[fd00::1]:8000", True)]


def test_pod_without_address_or_readiness_is_no_endpoint():
    assert endpoints(8000, ip="") == []
    assert endpoints(8000, labels="app=web") == []
    assert endpoints(8000, is_ready=False)[0][2] is False
    assert endpoints(8000, is_ending=True)[0][2] is False


@pytest.mark.parametrize(
    ("said", "ports"),
    [
        ("", []),
        ("8000", [8000]),
        ("8000, 8001 , 8002", [8000, 8001, 8002]),
        ("8000,invalid,8002", [8000, 8002]),
        ("8000,-1,8002", [8000, 8002]),
        ("8000,8001,8000", [8000, 8001]),
        ("8000,9000", [8000]),
    ],
)
def test_pod_restricts_itself_to_some_of_the_ports(said, ports):
    found = endpoints(8000, 8001, 8002, annotations={ACTIVE: said})
    assert [int(url.rpartition(":")[2]) for _, url, _ in found] == ports


def test_names_of_ranks_stay_where_others_are_inactive():
    found = endpoints(8000, 8001, annotations={"llm-d.ai/active-ports": "8001"})
    assert [name for name, _, _ in found] == ["a-rank-1"]


def test_annotations_name_event_ports_counted_from_the_first_rank():
    said = {
        "kv-router/events-port": "5557",
        "kv-router/replay-port": " 5657 ",
        "kv-router/p2p-port": "5710",
    }
    found = endpoints(8000, 8001, annotations=said)
    assert [url for _, url, _ in found] == [
        "http://10.0.0.1:8000;events=tcp://10.0.0.1:5557;replay=tcp://10.0.0.1:5657;p2p=10.0.0.1:5710",
        "http://10.0.0.1:8001;events=tcp://10.0.0.1:5558;replay=tcp://10.0.0.1:5658;p2p=10.0.0.1:5711",
    ]
    assert parsed_url(found[1][1], "pod").p2p == "10.0.0.1:5711"


@pytest.mark.parametrize(
    ("role", "option"),
    [
        ("prefill", ";role=prefill"),
        ("encode-prefill", ";role=prefill"),
        ("decode", ""),
        ("prefill-decode", ""),
        ("both", ""),
    ],
)
def test_label_names_the_role(role, option):
    found = endpoints(8000, labels=f"app=vllm,llm-d.ai/role={role}")
    assert [url for _, url, _ in found] == [f"http://10.0.0.1:8000{option}"]
    assert parsed_url(found[0][1], "pod").text == found[0][1]


@pytest.mark.parametrize(
    "fields",
    [
        {"labels": "app=vllm,llm-d.ai/role=encode"},
        {"ip": "engine.example"},
        {"annotations": {"kv-router/events-port": "many"}},
        {"annotations": {"kv-router/events-port": "5557;x=1"}},
        {"annotations": {"kv-router/replay-port": "70000"}},
        {"annotations": {"kv-router/p2p-port": "70000"}},
        {"annotations": {"kv-router/p2p-port": "5710"}, "ip": "fd00::7"},
    ],
)
def test_invalid_pod_is_refused(fields):
    with pytest.raises(InvalidFieldError):
        endpoints(8000, **fields)


def test_priorities_are_those_of_the_pools_objectives():
    objects = [
        made.objective("chat", 5),
        made.objective("batch", -1),
        made.objective("plain"),
        made.objective("other", 9, pool="llama"),
    ]
    found = priorities_for("qwen", [read(each, InferenceObjective) for each in objects])
    assert found == {"chat": 5, "batch": -1, "plain": 0}


def rewrites(*objects):
    return rewrites_for("qwen", [read(each, InferenceModelRewrite) for each in objects])


def test_exact_rule_comes_before_a_generic_one_and_the_oldest_object_first():
    found = rewrites(
        made.rewrite("new", (["m"], ["late"]), created="2026-03-01T00:00:00Z"),
        made.rewrite("old", ([], ["any"]), (["m"], ["early"]), (["m"], ["second"])),
        made.rewrite("other", (["m"], ["else"]), pool="llama"),
    )
    assert (found.model("m", 0.0), found.model("x", 0.0)) == ("early", "any")
    assert rewrites().model("m", 0.0) is None


@pytest.mark.parametrize(
    ("targets", "draws"),
    [
        (["a", "b"], {0.0: "a", 0.49: "a", 0.5: "b", 0.99: "b"}),
        ([("a", 9), ("b", 1)], {0.0: "a", 0.89: "a", 0.91: "b"}),
        (["a", ("b", 1)], {0.0: "b", 0.99: "b"}),  # if one has a weight, those without have none
    ],
)
def test_targets_are_drawn_by_their_weights(targets, draws):
    found = rewrites(made.rewrite("split", ([], targets)))
    assert {draw: found.model("m", draw) for draw in draws} == draws
