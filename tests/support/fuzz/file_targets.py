"""Parsers of what operators write: registrations, objects of a cluster, tokens, tokenizers."""

import json
from ipaddress import ip_address

import msgspec

from router.discovery.attach.engine_url import parsed_url
from router.discovery.kubernetes.found import Found, registration
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
from router.errors import ConfigError, InvalidFieldError
from router.forward.tokenizer.errors import TokenizerFilesError
from router.forward.tokenizer.files import read_files
from router.protocol.values import UNREADABLE
from router.runtime.security.tokens import read_tokens
from support.fuzz.target import Target, scratch_folder
from support.processes import api_server


def _registrations(data):
    """A pod's annotation and the template of all pods are read alike."""
    text = data.decode("utf-8", "replace")
    for template, said in (("{}", text), (text, "")):
        found = Found("name", "10.0.0.1", True, False, said)
        registered = registration(template, "namespace", found, 7)
        assert registered.worker_id == 7


def _registration_seeds():
    fields = {
        "endpoint": "http://{ip}:8000", "model_name": "m", "block_size": 16, "role": "decode",
        "kv_events_endpoint": "tcp://{ip}:5557", "taints": ["a"], "data_parallel_size": 2,
    }  # fmt: skip
    return [json.dumps(fields).encode(), b'{"endpoint":"http://{ip}:1","block_size":16}']


def _tokens(data):
    table = read_tokens(data.decode("utf-8", "replace"))
    assert all(table.find(b"absent") is None for _ in range(2))


_TOKENS = b"""[[tokens]]
name = "a"
token = "0123456789abcdef0123456789abcdef"
scopes = ["metrics", "route"]
expires = 2030-01-01T00:00:00Z
[[tokens]]
name = "b"
token_sha256 = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
scopes = ["route"]
tenant = "t"
routing_groups = ["g"]
requests_per_s = 5.0
[[tenants]]
name = "t"
requests_per_s = 9
"""


class TokenizerFolders:
    """A configuration beside a tokenizer is read, or named in the error."""

    def __init__(self):
        self._folder = scratch_folder(self)
        (self._folder / "tokenizer.json").write_text("{}")

    def __call__(self, data):
        (self._folder / "tokenizer_config.json").write_bytes(data)
        files = read_files(str(self._folder))
        assert all(isinstance(each, str) for each in files.special_tokens.values())


def _tokenizer_seeds():
    token = {"content": "<s>", "lstrip": False, "special": True}
    config = {
        "bos_token": "<s>", "eos_token": token, "additional_special_tokens": ["<a>", token],
        "added_tokens_decoder": {"1": token}, "chat_template": [{"name": "d", "template": "t"}],
    }  # fmt: skip
    return [json.dumps(config).encode(), json.dumps({"chat_template": "{{ a }}"}).encode()]


_KINDS = {
    "InferencePool": InferencePool,
    "Pod": Pod,
    "InferenceObjective": InferenceObjective,
    "InferenceModelRewrite": InferenceModelRewrite,
}


def _pools(data):
    """An object of a cluster: a pool's pods are engines at addresses, or refused."""
    kind = next((name for name in _KINDS if name.encode() in data), "Pod")
    each = msgspec.json.decode(data, type=_KINDS[kind])
    if kind == "InferencePool":
        for found in endpoints_of(each, _POD):
            assert parsed_url(engine_url(found), "pod").host == "10.0.0.1"
    elif kind == "Pod":
        for found in endpoints_of(_POOL, each):
            ip_address(parsed_url(engine_url(found), "pod").host)
    elif kind == "InferenceObjective":
        priorities_for("qwen", [each])
    else:
        rewrites_for("qwen", [each]).model("m", 0.5)


_POD = msgspec.convert(api_server.pod("a", "10.0.0.1"), Pod)
_POOL = msgspec.convert(api_server.pool(8000, 8001), InferencePool)


def _pool_seeds():
    said = {"kv-router/events-port": "5557", "llm-d.ai/active-ports": "8000,8001"}
    labels = "app=vllm,llm-d.ai/role=prefill"
    objects = [
        api_server.pool(8000, 8001),
        api_server.pod("a", "10.0.0.1", annotations=said, labels=labels),
        api_server.objective("batch", -1),
        api_server.rewrite("names", (["gpt"], ["m", ("n", 2)])),
    ]
    return [json.dumps(each).encode() for each in objects]


TARGETS = [
    Target(
        "pools",
        lambda: _pools,
        _pool_seeds,
        (InvalidFieldError, *UNREADABLE),
        "json",
    ),
    Target(
        "registrations", lambda: _registrations, _registration_seeds, (InvalidFieldError,), "json"
    ),
    Target("token_files", lambda: _tokens, lambda: [_TOKENS], (ConfigError,)),
    Target("tokenizers", TokenizerFolders, _tokenizer_seeds, (TokenizerFilesError,), "json"),
]
