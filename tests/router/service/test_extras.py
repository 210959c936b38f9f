"""What a router says on a terminal once it has started."""

import shlex

from router.service.extras import next_steps


def test_router_without_workers_says_how_to_attach_an_engine():
    attach, prompt = next_steps("http://127.0.0.1:1", None, [])
    assert attach.endswith("kv-router attach http://HOST:8000 --url http://127.0.0.1:1")
    assert "curl -s http://127.0.0.1:1/select " in prompt


def test_model_of_any_name_is_quoted_for_the_shell():
    name = "a'b; \"$(c)"
    _, prompt = next_steps("http://127.0.0.1:1", "http://127.0.0.1:2/v1", [name])
    assert shlex.split(prompt)[-1] == ('{"model":"a\'b; \\"$(c)","prompt":"Once","max_tokens":8}')
