"""An engine with the APIs of agents, as vLLM serves them: one token a byte, and a prefix cache.

Answers are numbers, a token each. What `/render` and `/tokenize` make of requests is what the
recorded engine made of them; `shift` makes the engine itself count other tokens.
"""

import asyncio
import itertools
import json
from contextlib import asynccontextmanager

import msgspec
import xxhash
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from router.forward.apis.chats.as_chat import as_chat
from router.forward.apis.chats.chat_form import NoChatError
from router.forward.apis.chats.dialect import VLLM
from router.forward.request_body import read_completion_request
from router.runtime.http_server.limits import HttpLimits
from router.runtime.http_server.server import HttpServer, listening
from support.engines.recorded_tokenizer import recorded_tokenizer
from support.engines.zmq_engines import Engine, stored
from support.processes.servers import free_port

CLOSED = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable"
IMAGE, IMAGE_TOKENS = 259, 17
OPEN_PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")


def openai_error(status, message, param=None, kind="BadRequestError"):
    error = {"message": message, "type": kind, "param": param, "code": status}
    return JSONResponse({"error": error}, status_code=status)


async def _no_route(_, __):
    return JSONResponse({"detail": "Not Found"}, status_code=404)


def _not_found(response_id):
    message = f"Response with id '{response_id}' not found."
    return openai_error(404, message, "response_id", "invalid_request_error")


class AgentEngine:
    """`serves`: its generating APIs; `renders`: as with `--enable-scale-out`; `stores`: it keeps
    responses; `key`: what `/v1` asks for. `asked`: path and body of each request; `gone`: streams
    whose client went away.
    """

    def __init__(
        self,
        block_size=16,
        *,
        renders=True,
        stores=False,
        key=None,
        shift=0,
        owned_by="vllm",
        serves=OPEN_PATHS,
    ):
        self.block_size = block_size
        self.renders = renders
        self.stores = stores
        self.key = key
        self.shift = shift
        self.owned_by = owned_by
        self.serves = serves
        self.events = Engine(topic="kv")
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.asked = []
        self.gone = 0
        self.pause_s = 0.0
        self.breaks_after = None
        self.responses = {}
        self._tokenizer = recorded_tokenizer()
        self._numbers = itertools.count(1)
        self._held = set()

    @asynccontextmanager
    async def running(self):
        posts = [(path, self.generate) for path in self.serves]
        posts += [(f"{path}/render", self.render) for path in OPEN_PATHS]
        posts += [
            ("/tokenize", self.tokenize),
            ("/v1/messages/count_tokens", self.count_tokens),
            ("/v1/responses/{id}/cancel", self.cancel),
        ]
        routes = [Route(path, handler, methods=["POST"]) for path, handler in posts]
        routes += [
            Route("/v1/models", self.models),
            Route("/version", self.version),
            Route("/v1/responses/{id}", self.kept, methods=["GET", "DELETE"]),
        ]
        with self.events, listening("127.0.0.1", self.port) as listener:
            app = Starlette(routes=routes, exception_handlers={404: _no_route})
            server = HttpServer(app, HttpLimits(max_connections=100))
            serving = asyncio.create_task(server.serve([listener]))
            try:
                yield self
            finally:
                server.should_exit = True
                await serving

    def registration(self, worker_id=1, model="m"):
        """The body of `POST /workers`."""
        return {
            "worker_id": worker_id, "model_name": model, "endpoint": self.url,
            "block_size": self.block_size,
            "kv_events_endpoints": {"0": self.events.endpoint},
            "replay_endpoints": {"0": self.events.replay_endpoint},
        }  # fmt: skip

    def forget(self):
        """As if just started, so that it answers like the first time."""
        self._held.clear()
        self._numbers = itertools.count(1)

    @property
    def held_blocks(self):
        return len(self._held)

    def bodies(self, path):
        return [json.loads(body) for asked, body in self.asked if asked == path]

    def _refused(self, request):
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return JSONResponse({"error": "Unauthorized"}, status_code=401)
        return None

    async def models(self, request):
        return self._refused(request) or JSONResponse({"data": [{"owned_by": self.owned_by}]})

    async def version(self, _):
        return JSONResponse({"version": "0.32.0"})

    # ── Prompts ──────────────────────────────────────────────────────────────────────────────────

    def prompt(self, path, body):
        """Tokens of a request, and the features of its images. Raises NoChatError."""
        asked = read_completion_request(path, body)
        if path == "/v1/completions":
            prompt = asked.prompt
            return list(prompt.encode() if isinstance(prompt, str) else prompt), None
        return self._chat(as_chat(asked, VLLM).chat)

    def _chat(self, chat):
        """An image is a token of its own in the text, and many in the prompt."""
        fields, hashes = dict(chat.fields), []
        messages = json.loads(bytes(fields["messages"]))
        for message in messages:
            if isinstance(message.get("content"), list):
                message["content"] = [_as_text(part, hashes) for part in message["content"]]
        fields["messages"] = messages
        text = read_completion_request("/v1/chat/completions", msgspec.json.encode(fields))
        tokens, places = [], []
        for token in self._tokenizer.tokens(text)[1]:
            if token == IMAGE:
                places.append({"offset": len(tokens), "length": IMAGE_TOKENS})
            tokens += [token] * (IMAGE_TOKENS if token == IMAGE else 1)
        placed = {"mm_hashes": {"image": hashes}, "mm_placeholders": {"image": places}}
        return tokens, placed if hashes else None

    async def tokenize(self, request):
        body = await self._read(request)
        if "messages" in json.loads(body):
            chat = read_completion_request("/v1/chat/completions", body)
            return JSONResponse({"tokens": self._chat(chat)[0]})
        return JSONResponse({"tokens": self.prompt("/v1/completions", body)[0]})

    async def render(self, request):
        body = await self._read(request)
        if not self.renders:
            return openai_error(403, CLOSED)
        try:
            tokens, features = self.prompt(request.url.path.removesuffix("/render"), body)
        except NoChatError as error:
            return openai_error(400, str(error))
        tokens = self._as_computed(tokens)
        return self._refused(request) or JSONResponse({"token_ids": tokens, "features": features})

    async def count_tokens(self, request):
        tokens, _ = self.prompt("/v1/messages", await self._read(request))
        count = {"input_tokens": len(self._as_computed(tokens))}
        return self._refused(request) or JSONResponse(count)

    def _as_computed(self, tokens):
        return [*tokens, *[1] * self.shift]

    async def _read(self, request):
        body = await request.body()
        self.asked.append((request.url.path, body))
        return body

    # ── Answers ──────────────────────────────────────────────────────────────────────────────────

    async def generate(self, request):
        path, body = request.url.path, await self._read(request)
        refused = self._refused(request)
        if refused is not None:
            return refused
        asked = json.loads(body)
        previous = asked.get("previous_response_id")
        if previous is not None and previous not in self.responses:
            return _not_found(previous)
        if path == "/v1/messages" and not isinstance(asked.get("max_tokens"), int):
            return openai_error(400, "1 validation error: max_tokens", "body.max_tokens")
        asked.pop("previous_response_id", None)
        try:
            tokens, features = self.prompt(path, json.dumps(asked).encode())
        except NoChatError as error:
            return openai_error(400, str(error))
        tokens = self._as_computed(tokens)
        cached = self._cached_tokens(tokens, features, asked.get("cache_salt"))
        most = asked.get("max_output_tokens") or asked.get("max_tokens") or 4
        name = f"{self.port}-{next(self._numbers)}"
        answer = _ANSWERS[path](asked, name, len(tokens), cached, min(most, 50))
        if self.stores and path == "/v1/responses":
            self.responses[answer.id] = answer.whole()
        if not asked.get("stream"):
            return JSONResponse(answer.whole())
        return StreamingResponse(self._events(answer), media_type="text/event-stream")

    async def _events(self, answer):
        events = list(answer.events())
        try:
            for number, event in enumerate(events):
                if number == self.breaks_after:
                    error = {"type": "error", "error": {"type": "x", "message": "core died"}}
                    yield b"event: error\ndata: " + json.dumps(error).encode() + b"\n\n"
                    return
                yield event
                await asyncio.sleep(self.pause_s)
        except asyncio.CancelledError:
            self.gone += 1
            raise

    async def kept(self, request):
        response_id = request.path_params["id"]
        self.asked.append((f"{request.method} {request.url.path}", b""))
        if response_id not in self.responses:
            return _not_found(response_id)
        if request.method == "DELETE":
            del self.responses[response_id]
            deleted = {"id": response_id, "object": "response", "deleted": True}
            return JSONResponse(deleted)
        return JSONResponse(self.responses[response_id])

    async def cancel(self, request):
        self.asked.append((request.url.path, b""))
        answer = self.responses.get(request.path_params["id"])
        if answer is None:
            return _not_found(request.path_params["id"])
        return JSONResponse({**answer, "status": "cancelled"})

    # ── The cache ────────────────────────────────────────────────────────────────────────────────

    def _cached_tokens(self, tokens, features, salt):
        """Blocks found in front are reused, the others computed, kept and published."""
        size = self.block_size
        keys = [_keys(features, block * size, size) for block in range(len(tokens) // size)]
        names = [
            xxhash.xxh3_64_intdigest(
                msgspec.msgpack.encode([tokens[: (i + 1) * size], salt, keys[: i + 1]])
            )
            for i in range(len(keys))
        ]
        first = next((i for i, name in enumerate(names) if name not in self._held), len(names))
        self._held.update(names)
        if first < len(names):
            extra = [list(each) or None for each in keys[first:]]
            if salt and not first:
                extra[0] = [*(extra[0] or []), salt]
            parent = names[first - 1] if first else None
            stored_tokens = tokens[first * size : len(names) * size]
            event = stored(
                names[first:], stored_tokens, parent, size, lora_name=None, extra_keys=extra
            )
            self.events.publish(event)
        return min(first, (len(tokens) - 1) // size) * size


def _as_text(part, hashes):
    if part.get("type") != "image_url":
        return part
    url = part["image_url"]["url"].encode()
    hashes.append(part.get("uuid") or xxhash.xxh3_128_hexdigest(url) * 2)
    return {"type": "text", "text": "<|image|>"}


def _keys(features, start, size):
    """Identifier and relative place of each image in a block, as vLLM has them."""
    if features is None:
        return []
    places = features["mm_placeholders"]["image"]
    return [
        (identifier, place["offset"] - start)
        for identifier, place in zip(features["mm_hashes"]["image"], places, strict=True)
        if place["offset"] < start + size and place["offset"] + place["length"] > start
    ]


class Answer:
    """`texts`: the tokens of the answer."""

    def __init__(self, asked, name, prompt, cached, tokens):
        self.asked, self.prompt, self.cached = asked, prompt, cached
        self.id = f"{self.PREFIX}{name}"
        self.texts = [f"{n}\u2028 " for n in range(tokens)]
        self.text = "".join(self.texts)


def _event(name, **data):
    """Unescaped, as vLLM writes it."""
    said = json.dumps({"type": name, **data}, ensure_ascii=False)
    return f"event: {name}\ndata: {said}\n\n".encode()


class MessagesAnswer(Answer):
    PREFIX = "chatcmpl-"

    def usage(self):
        size = 16
        created = self.prompt // size * size - self.cached
        return {
            "input_tokens": self.prompt - self.cached - created,
            "output_tokens": len(self.texts),
            "cache_creation_input_tokens": created,
            "cache_read_input_tokens": self.cached,
        }

    def _message(self, **fields):
        about = {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.asked["model"],
        }
        return {**about, "stop_reason": None, "stop_sequence": None, **fields}

    def whole(self):
        content = [{"type": "text", "text": self.text}]
        return self._message(content=content, usage=self.usage(), stop_reason="max_tokens")

    def events(self):
        usage = {"input_tokens": self.prompt, "output_tokens": 0}
        yield _event("message_start", message=self._message(content=[], usage=usage))
        block = {"type": "text", "text": ""}
        yield _event("content_block_start", content_block=block, index=0)
        for text in self.texts:
            delta = {"type": "text_delta", "text": text}
            yield _event("content_block_delta", delta=delta, index=0)
        yield _event("content_block_stop", index=0)
        delta = {"stop_reason": "max_tokens", "stop_sequence": None}
        yield _event("message_delta", delta=delta, usage=self.usage())
        yield _event("message_stop")


class ResponsesAnswer(Answer):
    PREFIX = "resp_"

    def _response(self, status, output, usage=None):
        return {
            "id": self.id, "object": "response", "created_at": 1, "status": status,
            "model": self.asked["model"], "output": output, "parallel_tool_calls": True,
            "tool_choice": "auto", "tools": [], "usage": usage, "error": None,
            "incomplete_details": None, "instructions": None, "metadata": None,
            "temperature": 1.0, "top_p": 1.0,
        }  # fmt: skip

    def _item(self, status, content):
        about = {"id": f"msg_{self.id}", "type": "message", "role": "assistant"}
        return {**about, "status": status, "content": content}

    def whole(self):
        usage = {
            "input_tokens": self.prompt,
            "input_tokens_details": {"cached_tokens": self.cached},
            "output_tokens": len(self.texts),
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.prompt + len(self.texts),
        }
        part = {"type": "output_text", "text": self.text, "annotations": []}
        return self._response("completed", [self._item("completed", [part])], usage)

    def events(self):
        numbers = itertools.count()
        begun = self._response("in_progress", [])
        at = {"output_index": 0}
        of = {**at, "item_id": f"msg_{self.id}", "content_index": 0}
        part = {"type": "output_text", "text": "", "annotations": []}
        whole = self.whole()
        (item,) = whole["output"]

        def event(name, **data):
            return _event(name, **data, sequence_number=next(numbers))

        yield event("response.created", response=begun)
        yield event("response.in_progress", response=begun)
        yield event("response.output_item.added", item=self._item("in_progress", []), **at)
        yield event("response.content_part.added", part=part, **of)
        for text in self.texts:
            yield event("response.output_text.delta", delta=text, logprobs=[], **of)
        yield event("response.output_text.done", text=self.text, logprobs=[], **of)
        yield event("response.content_part.done", part=item["content"][0], **of)
        yield event("response.output_item.done", item=item, **at)
        yield event("response.completed", response=whole)


class ChunkedAnswer(Answer):
    """A chat or a completion."""

    def _body(self, choice, **fields):
        kind = self.KIND + ".chunk" * bool(self.asked.get("stream") and "chat" in self.KIND)
        about = {"id": self.id, "object": kind, "created": 1, "model": self.asked["model"]}
        return {**about, "choices": choice, **fields}

    def _usage(self):
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": len(self.texts),
            "total_tokens": self.prompt + len(self.texts),
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }

    def whole(self):
        choice = {"index": 0, "logprobs": None, "finish_reason": "length", **self._said(self.text)}
        return self._body([choice], usage=self._usage())

    def events(self):
        for number, text in enumerate(self.texts, 1):
            reason = "length" if number == len(self.texts) else None
            choice = {"index": 0, "logprobs": None, "finish_reason": reason, **self._piece(text)}
            yield self._chunk(self._body([choice]))
        if (self.asked.get("stream_options") or {}).get("include_usage"):
            yield self._chunk(self._body([], usage=self._usage()))
        yield b"data: [DONE]\n\n"

    def _chunk(self, body):
        return f"data: {json.dumps(body, ensure_ascii=False)}\n\n".encode()


class ChatAnswer(ChunkedAnswer):
    PREFIX, KIND = "chatcmpl-", "chat.completion"

    def _said(self, text):
        return {"message": {"role": "assistant", "content": text}}

    def _piece(self, text):
        return {"delta": {"content": text}}


class CompletionAnswer(ChunkedAnswer):
    PREFIX, KIND = "cmpl-", "text_completion"

    def _said(self, text):
        return {"text": text}

    _piece = _said


_ANSWERS = {
    "/v1/completions": CompletionAnswer,
    "/v1/chat/completions": ChatAnswer,
    "/v1/responses": ResponsesAnswer,
    "/v1/messages": MessagesAnswer,
}
