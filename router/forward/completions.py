"""Requests for completions: admitted, read, answered, counted."""

import asyncio
import logging

from router.body_errors import BodyTooLargeError, MalformedBodyError
from router.errors import InvalidFieldError, KvRouterError
from router.forward.bodies import CHAT, Asked, read_asked
from router.forward.call import Call
from router.forward.config import ForwardConfig
from router.forward.errors import ModelNotFoundError, TooMuchAtOnceError
from router.forward.headers import check_body
from router.forward.known_calls import KnownCalls
from router.forward.metrics import Ended, ForwardMetrics
from router.forward.placing import Placing, PromptTokens
from router.forward.push import Errand, Push
from router.forward.roster import Roster
from router.forward.tokenizing import Tokenizing
from router.forward.words import Words, read
from router.placement_errors import NoEndpointsError
from router.process.bodies import THREAD_BYTES
from router.process.request_ids import ANSWERED
from router.protocol.requests import SelectRequest
from router.security.caller import ANYBODY
from router.security.errors import TooManyRequestsError
from router.security.guard import Guard
from router.security.guarded import admit

log = logging.getLogger(__name__)


class Completions:
    """Answers calls. Each is admitted once, and then answered, refused or gone."""

    def __init__(
        self,
        config: ForwardConfig,
        push: Push,
        tokenizing: Tokenizing,
        metrics: ForwardMetrics,
        guard: Guard,
        roster: Roster,
    ) -> None:
        self.config = config
        self._push = push
        self._tokenizing = tokenizing
        self._metrics = metrics
        self._guard = guard
        self._roster = roster
        self.known_calls = KnownCalls()
        self._placing = Placing(config.routing_group, config.mode == "direct", config.max_wait_s)

    def reconfigure(self, config: ForwardConfig) -> None:
        """Go on with other limits, those of `reload.LIVE`."""
        self.config = config

    def tokenizers(self) -> dict[str, object]:
        """What is to be told of tokenizers of our own, where there are any."""
        return {"tokenizers": self._tokenizing.told()} if self._tokenizing.has_own else {}

    def admit(self, call: Call) -> None:
        """A head is here. Raises what it is to be refused with. What speaks against one that was
        admitted before is the number of requests, or what a guard says who asks each of them.
        """
        self._metrics.in_flight += 1
        if self._metrics.in_flight > self.config.max_requests:
            raise TooManyRequestsError(self.config.max_requests)
        if call.known_words is not None and self._guard.is_idle:
            call.caller = ANYBODY
            return
        call.caller = admit(self._guard, "POST", call.path, call.headers)
        check_body(call.headers, self.config.body_limit_bytes)

    def hold(self, call: Call) -> None:
        """Some of its body is here, and stays until it is answered. Raises BodyTooLargeError,
        TooMuchAtOnceError.
        """
        more_bytes = call.received_bytes - call.held_bytes
        call.held_bytes += more_bytes
        self._metrics.body_bytes += more_bytes
        if call.held_bytes > self.config.body_limit_bytes:
            raise BodyTooLargeError(self.config.body_limit_bytes)
        if self._metrics.body_bytes > self.config.bodies_limit_bytes:
            raise TooMuchAtOnceError(self.config.bodies_limit_bytes)

    def refuse(self, call: Call, error: KvRouterError) -> None:
        """Say why it is not answered."""
        self._metrics.refusals.labels(error.code).inc()
        self._end(call, "refused" if error.http_status < 500 else "failed")
        call.refuse(error)

    def gone(self, call: Call) -> None:
        """Whoever asked has hung up."""
        if call.task is not None:
            call.task.cancel()
        elif call.is_turn:
            self._end(call, "client_gone")

    async def answer(self, call: Call) -> None:
        """Answer a call that is whole."""
        ANSWERED.set(call.ids)
        ended: Ended = "failed"
        try:
            ended = await self._answered(call)
        except KvRouterError as error:
            ended = self._refused(call, error)
        except asyncio.CancelledError:
            if not call.disconnected:
                raise
            ended = "client_gone"
        except Exception:  # a bug of ours; others' requests go on
            log.exception("a request failed")
            ended = self._refused(call, KvRouterError("internal error"))
        finally:
            self._end(call, ended)

    async def _answered(self, call: Call) -> Ended:
        asked, words = await _read(call)
        tokens = await self._tokenizing.tokens(asked)
        assert call.caller is not None
        request = self._placing.request_in(words, asked, call.headers, call.caller, tokens)
        try:
            if asked.is_query:
                return await self._told(asked, tokens, request, call)
            counted = len(tokens.token_ids) if tokens.are_counted else None
            prompt = tokens.token_ids if tokens.are_certain else None
            request_id = call.ids.request_id
            errand = Errand(asked, call.headers, request, request_id, counted, prompt, words)
            return await self._push.forward(errand, call)
        except (InvalidFieldError, MalformedBodyError):
            asked.check_prompt()  # in the client's own words
            raise
        except NoEndpointsError as error:
            if await self._roster.is_unknown(asked.model):
                raise ModelNotFoundError(asked.model, self._roster.models) from error
            raise

    async def _told(
        self,
        asked: Asked,
        tokens: PromptTokens,
        request: SelectRequest,
        call: Call,
    ) -> Ended:
        """Where the request would go, and its tokens, so that they need not be found again."""
        decision = await self._push.router.select(request)
        prefill = await self._push.prefill.place(request)
        place = {"decode_worker_id": decision.worker_id, "decode_dp_rank": decision.dp_rank}
        if prefill is not None:
            place |= {"prefill_worker_id": prefill.worker_id, "prefill_dp_rank": prefill.dp_rank}
        said: dict[str, object] = {"worker_id": place, "overlap_blocks": decision.overlap_blocks}
        if tokens.are_certain:
            said["token_ids"] = list(tokens.token_ids)
        kind = "chat.completion" if asked.path == CHAT else "text_completion"
        body = {"id": call.ids.request_id, "object": kind, "model": asked.model, "choices": []}
        call.json({**body, "nvext": said})
        return "query"

    def _refused(self, call: Call, error: KvRouterError) -> Ended:
        self._metrics.refusals.labels(error.code).inc()
        call.refuse(error)
        return "refused" if error.http_status < 500 else "failed"

    def _end(self, call: Call, ended: Ended) -> None:
        self._metrics.in_flight -= 1
        self._metrics.body_bytes -= call.held_bytes
        call.body()  # its connection remembers the call, and is garbage that lies about for long
        self._metrics.requests.count(f"POST {call.path}", ended)


async def _read(call: Call) -> tuple[Asked, Words | None]:
    """What a call asks, and in which words. Long bodies are read on another thread: between two
    steps of that, others are answered.
    """
    body = call.body()
    if len(body) > THREAD_BYTES:
        return await asyncio.to_thread(read_asked, call.path, body), None
    return read(call.path, body, call.known_words)
