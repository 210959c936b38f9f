"""Parsers of what callers and engines say over HTTP: bodies, heads, streams."""

import asyncio
import json
from contextlib import suppress

import msgspec
from msgspec import Raw

from router.api.rpc.codecs import JSON, MSGPACK
from router.client.errors import rebuilt
from router.errors import InvalidFieldError
from router.forward.apis.api import APIS, CHAT
from router.forward.apis.chats.as_chat import as_chat
from router.forward.apis.chats.chat_form import NoChatError
from router.forward.apis.chats.dialect import (
    OLDER_VLLM,
    SGLANG,
    TENSORRT_LLM,
    UNKNOWN,
    VLLM,
)
from router.forward.apis.event_stream import EngineErrorEvent, EventStream
from router.forward.apis.media_names import with_own_names
from router.forward.apis.sse import EventSplitter
from router.forward.migration import Before, continuation, is_migratable
from router.forward.prefill.handoff import (
    is_handed_over,
    is_to_bypass,
    prefill_body,
    read_prefilled,
)
from router.forward.request_body import read_completion_request
from router.forward.request_templates import read
from router.forward.stream_state import StreamState, Wanted
from router.forward.tokenizer.chats import read_chat
from router.forward.tokenizer.conversation import rendered
from router.forward.tokenizer.errors import NotLocalError, PromptRefusedError
from router.forward.tokenizer.template import ChatTemplate
from router.protocol.requests import SelectRequest
from router.runtime.http_client.connection import MOST_HEADS, Connection, UpstreamError
from router.runtime.http_server.head_cache import HeadCache
from router.runtime.process.errors import MalformedBodyError
from router.runtime.process.json_bodies import decode_now
from router.scheduler.errors import NoEndpointsError
from support.chaos.token_fuzz import SEEDS as TOKEN_SEEDS
from support.chaos.token_fuzz import agree, outcome, strictly
from support.engines.recorded_tokenizer import FOLDER, RECORDED
from support.fuzz.target import Target

STREAMS = json.loads((FOLDER / "streams.json").read_text())["streams"]
REFUSED = (InvalidFieldError, MalformedBodyError)


class TokenBodies:
    """The kernel's reading of a body and msgspec's are the same."""

    def __init__(self):
        from router.api.token_requests import TokenRequests

        self._requests = TokenRequests(SelectRequest)

    def __call__(self, data):
        assert agree(self._requests, data)


# ── Commands on the bus ──────────────────────────────────────────────────────────────────────────

COMMANDS = [
    {"method": "select", "token_ids": [1, 2, 3], "model_name": "m", "kv_hint": {"a": [{"b": 1}]}},
    {
        "method": "select_and_reserve", "token_ids": [1, 2], "request_id": "r", "explain": True,
        "allowed_worker_ids": [1], "pinned_worker": {"worker_id": 1, "dp_rank": 0},
        "router_config_override": {"overlap_score_weight": 1.0}, "x": {"y": {}},
    },
    {"method": "free", "request_id": "r", "usage": {"prompt_tokens": 3, "cached_tokens": 1}},
    {"method": "prefill_complete", "request_id": "r"},
]  # fmt: skip


def _command_seeds(encode):
    from router.protocol.commands import Command

    tags = [each.__struct_config__ for each in Command.__args__]
    field, names = tags[0].tag_field, [each.tag for each in tags]
    seeds = [{**each, field: name} for name in names for each in COMMANDS[:2]]
    seeds += [{**COMMANDS[2], field: name} for name in names]
    return [encode(each) for each in seeds]


def _commands(codec):
    """A command is read as it is without the kernels and the known names."""
    strict = strictly(codec)

    def check(data):
        assert outcome(codec.decode, data) == outcome(strict, data)
        codec.decode(data, unknown := [])
        assert all(isinstance(name, str) for name in unknown)

    return lambda: check


# ── Completions ──────────────────────────────────────────────────────────────────────────────────


def _completion_seeds():
    common = {"model": "m", "stream": True, "max_tokens": 7, "min_tokens": 3, "n": 1}
    hints = {"osl": 7, "priority": 3, "latency_sensitivity": 0.5}
    nvext = {"annotations": ["query_instance_id:"], "agent_hints": hints, "token_data": [1, 2]}
    params = {"do_remote_prefill": True, "remote_block_ids": [1, 2], "remote_port": 5}
    bodies = [
        {**common, "prompt": [1], "kv_transfer_params": params, "usage": {"prompt_tokens": 1}},
        {**common, "prompt": "a text é", "stream_options": {"include_usage": True}},
        {**common, "prompt": [1, 2, 3], "return_token_ids": True, "nvext": nvext},
        {**common, "prompt": [[1, 2], [3]], "logit_bias": {"1": 2}},
        {**common, "prompt": ["a", "b"], "cache_salt": "s"},
        {**common, "messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 9},
        *(each["request"] for each in RECORDED["cases"]),
    ]
    return [json.dumps(each).encode() for each in bodies]


def _as_chats(asked):
    """Each engine's chat of a request can be sent on, or there is none."""
    for dialect in (VLLM, OLDER_VLLM, SGLANG, TENSORRT_LLM, UNKNOWN):
        try:
            form = as_chat(asked, dialect)
        except NoChatError:
            continue
        msgspec.json.decode(form.chat.to_engine(), type=dict[str, Raw])
    with suppress(REFUSED):
        _ = with_own_names(asked, "tenant")


def _completions(data):
    """A body is read or refused; what is read can be sent on, and continued elsewhere."""
    for path, api in APIS.items():
        try:
            asked = read_completion_request(path, data)
            asked.check_prompt()
        except REFUSED:
            continue
        if api.prompt != "prompt" and api.computes:
            _as_chats(asked)
        _ = api.reported(data), api.errors.of_engine(400, data)
        msgspec.json.decode(asked.to_engine(), type=dict[str, Raw])
        _ = asked.choices, asked.max_tokens, asked.is_query, asked.size_bytes, asked.known_tokens
        if is_migratable(asked):
            msgspec.json.decode(continuation(asked, [1, 2], [3]), type=dict[str, Raw])
        assert isinstance(prefill_body(asked), bytes)
        _ = is_handed_over(asked), is_to_bypass(asked), read_prefilled(data)
        known = []
        for _ in range(2):  # the second time by the template of the first
            again, _template = read(path, data, known)
            assert again.fields == asked.fields
            assert again.prompts == asked.prompts


# ── Chats ────────────────────────────────────────────────────────────────────────────────────────

_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}"
    "{% for c in m.tool_calls or [] %}{{ c['function']['arguments'] | tojson }}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<a>{% endif %}{{ tools }}"
)


class Chats:
    """A chat is rendered, refused, or left to the engine."""

    def __init__(self):
        self._template = ChatTemplate(_TEMPLATE)

    def __call__(self, data):
        asked = read_completion_request(CHAT, data)
        rendered(read_chat(asked.fields), self._template, {"bos_token": "<s>"})


def _chat_seeds():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "t"}, "u"]},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "r"},
        {"role": "tool", "content": "x", "tool_call_id": "1"},
        {"role": "developer", "content": "d", "name": "n"},
    ]
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
    tools = [{"type": "function", "function": function}]
    more = {"continue_final_message": False, "chat_template_kwargs": {"a": 1}}
    whole = {"model": "m", "messages": messages, "tools": tools, **more}
    return [
        json.dumps(whole).encode(),
        *(json.dumps({"messages": [each]}).encode() for each in messages),
    ]


# ── Streams ──────────────────────────────────────────────────────────────────────────────────────


def _event(**chunk):
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def _stream_seeds():
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": None}
    choice = {"index": 0, "text": "a", "token_ids": [1], "finish_reason": None}
    delta = {"index": 0, "delta": {"role": "assistant", "content": "a"}, "prompt_token_ids": [1]}
    return [
        _event(id="c", created=1, choices=[choice]) + _event(choices=[], usage=usage),
        _event(id="c", choices=[delta], usage=None) + b"data: [DONE]\r\n\r\n",
        b": comment\n\nevent: x\ndata: 1\n\n" + _event(error={"message": "m", "code": 500}),
        _event(choices=[{**choice, "finish_reason": "stop"}], usage=usage) + b"data: {",
        *("\n\n".join(text for _, text in each["events"]).encode() for each in STREAMS),
    ]


def _streams(data):
    """Events are the same however the bytes arrive; none of them stops the stream."""
    whole, halves, single = EventSplitter(), EventSplitter(), EventSplitter()
    events = whole.feed(data)
    half = len(data) // 2
    assert halves.feed(data[:half]) + halves.feed(data[half:]) == events
    if len(data) < 200:
        assert [e for at in range(len(data)) for e in single.feed(data[at : at + 1])] == events
    assert data.startswith(b"".join(events))
    for wanted in (Wanted(), Wanted(token_ids=True, usage=True)):
        state = StreamState(wanted)
        _take_all(state, events)
        state.go_on(Before("c", 7, is_chat=True, generated=len(state.token_ids)))
        _take_all(state, events)
    for api in APIS.values():
        if api.event_of is not None:
            _take_all(EventStream(api.event_of), events)


def _take_all(state, events):
    for event in events:
        try:
            shown, tokens = state.take(event)
        except EngineErrorEvent:
            continue
        assert tokens >= 0
        assert shown == b"" or shown.endswith((b"\n\n", b"\n\r\n"))


# ── Heads of HTTP messages ───────────────────────────────────────────────────────────────────────

_RESPONSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 5\r\n\r\nhello"
RESPONSES = [
    _RESPONSE,
    _RESPONSE.replace(b"length: 5", b"length: 0").removesuffix(b"hello"),
    _RESPONSE.replace(b"\r\n\r\n", b"\r\nx-request-id: r1\r\n\r\n"),
    _RESPONSE.replace(
        b"\r\n\r\n", b"\r\ntraceparent: 00-%b-%b-01\r\n\r\n" % (b"4b" * 16, b"00f0" * 4)
    ),
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\n" + _RESPONSE,
    b"HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n",
    b"HTTP/1.0 200 OK\r\n\r\nuntil the end",
]


class _Sink:
    """The writing side of a connection that is never read."""

    def __init__(self):
        self.is_closed = False

    def write(self, data):
        pass

    def abort(self):
        self.is_closed = True

    def pause_reading(self):
        pass

    def resume_reading(self):
        pass

    def get_write_buffer_size(self):
        return 0


class Responses:
    """A response is the same in one piece and in two, known or not; a bad one is an error."""

    def __init__(self):
        self._loop = asyncio.new_event_loop()
        self._known = HeadCache(MOST_HEADS)

    def __call__(self, data):
        at = len(data) // 2
        fresh = self._read([data], HeadCache(MOST_HEADS))
        assert self._read([data[:at], data[at:]], HeadCache(MOST_HEADS)) == fresh
        assert self._read([data], self._known) == fresh
        assert self._read([data], self._known) == fresh

    def _read(self, pieces, heads):
        return self._loop.run_until_complete(self._exchange(pieces, heads))

    async def _exchange(self, pieces, heads):
        connection = Connection("s", self._loop, lambda _: None, heads)
        connection.connection_made(_Sink())
        reading = self._loop.create_task(_answered(connection))
        for piece in filter(None, pieces):
            self._loop.call_soon(connection.data_received, piece)
        self._loop.call_soon(connection.connection_lost, None)
        return await reading

    def __del__(self):
        self._loop.close()


async def _answered(connection):
    try:
        answer = await connection.send(b"GET / HTTP/1.1", 5.0)
        body = await answer.read(1 << 20, 5.0)
    except UpstreamError as error:
        return "refused" if error.problem != "malformed" else "malformed"
    return answer.status, answer.headers, body


class ClientErrors:
    """The error of a response is rebuilt, whatever its body is."""

    def __call__(self, data):
        body = decode_now(msgspec.json.decode, data)
        error = rebuilt(body, 503, "9" * (len(data) % 9))
        assert isinstance(str(error), str)
        assert isinstance(error.body(), dict)


def _error_seeds():
    bodies = [NoEndpointsError("m", "g", "none").body(), InvalidFieldError("f", "r", "a").body()]
    bodies += [{"error": "x", "code": "queue_full", "retry_after_s": 1.5}, {"error": "y"}]
    return [json.dumps(each).encode() for each in bodies]


TARGETS = [
    Target("token_bodies", TokenBodies, lambda: [*TOKEN_SEEDS], (), "json"),
    Target(
        "commands_json", _commands(JSON), lambda: _command_seeds(msgspec.json.encode), REFUSED,
        "json",
    ),
    Target(
        "commands_msgpack", _commands(MSGPACK), lambda: _command_seeds(msgspec.msgpack.encode),
        REFUSED, "msgpack",
    ),
    Target("completions", lambda: _completions, _completion_seeds, (), "json"),
    Target(
        "chats", Chats, _chat_seeds, (*REFUSED, PromptRefusedError, NotLocalError), "json"
    ),
    Target("streams", lambda: _streams, _stream_seeds),
    Target("client_errors", ClientErrors, _error_seeds, REFUSED, "json"),
    Target("responses", Responses, lambda: [*RESPONSES]),
]  # fmt: skip
