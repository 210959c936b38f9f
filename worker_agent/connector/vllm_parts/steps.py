"""Translation of vLLM's requests and scheduler output for the leader.

This module names only the attributes that it reads of vLLM's objects, and imports nothing of vLLM.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from router.protocol.replies import BlockSource
from router.protocol.values import UNREADABLE, Rank
from worker_agent.connector.slots.protocol import (
    CachedRequest,
    EngineRequest,
    NewRequest,
    ScheduledStep,
)


class VllmRequest(Struct):
    """A request of the engine. `tokens`: the engine's own list, to which it appends."""

    key: str
    tokens: Sequence[int]
    lora_name: str | None = None
    cache_salt: str | None = None
    sent_tokens: int = 0
    """Number of its tokens that the leader knows."""
    is_started: bool = False
    """True if the engine has computed tokens of it."""
    num_computed_tokens: int = 0
    """Number of tokens that the engine had at its last query."""
    source: Rank | None = None
    """The rank that has more of its prompt, as a router's decision names it."""

    def for_leader(self, is_known: bool) -> EngineRequest:
        """Return the request for the leader, with all its tokens unless the leader knows them."""
        tokens = [] if is_known else list(self.tokens)
        self.sent_tokens = self.sent_tokens if is_known else len(tokens)
        return EngineRequest(self.key, tokens, self.lora_name, self.cache_salt)

    def new_tokens(self) -> list[int]:
        """Return the tokens that the leader does not know yet."""
        tokens = list(self.tokens[self.sent_tokens :])
        self.sent_tokens += len(tokens)
        return tokens


def prompt_of(request: Any) -> VllmRequest | None:
    """Return the prompt of a vLLM request.

    Returns None if its blocks do not follow from its tokens alone, or it must not be served from a
    cache.
    """
    is_other = request.mm_features or request.prompt_embeds is not None or request.resumable
    if is_other or request.prompt_token_ids is None or request.skip_reading_prefix_cache:
        return None
    lora = request.lora_request
    return VllmRequest(
        request.request_id,
        request.all_token_ids,
        None if lora is None else lora.lora_name,
        request.cache_salt,
        source=_source_of(request.kv_transfer_params),
    )


def _source_of(params: Any) -> Rank | None:
    """Return `kv_transfer_params.source` of a request; None without a valid one."""
    if not isinstance(params, Mapping) or params.get("source") is None:
        return None
    try:
        source = msgspec.convert(params["source"], BlockSource)
    except UNREADABLE:
        return None
    return Rank(source.worker_id, source.dp_rank)


class _New(Protocol):
    @property
    def req_id(self) -> str: ...
    @property
    def block_ids(self) -> tuple[list[int], ...]: ...
    @property
    def num_computed_tokens(self) -> int: ...


def scheduled_step(output: Any, prompts: Mapping[str, VllmRequest]) -> ScheduledStep:
    """Return vLLM's `SchedulerOutput`, reduced to these requests. O(requests)."""
    new: list[NewRequest] = []
    cached = _cached(output.scheduled_cached_reqs, prompts)
    for each in output.scheduled_new_reqs:
        prompt = prompts.get(each.req_id)
        if prompt is None:
            continue
        if prompt.is_started:  # vLLM's second model runner lists resumed requests as new.
            cached.append(_resumed(each, prompt))
        else:
            blocks = list(map(list, each.block_ids))
            new.append(NewRequest(each.req_id, blocks, each.num_computed_tokens))
        prompt.is_started = True
    scheduled = output.num_scheduled_tokens.items()
    return ScheduledStep(
        {key: count for key, count in scheduled if key in prompts},
        new,
        cached,
        [key for key in output.preempted_req_ids or () if key in prompts],
    )


def _resumed(new: _New, prompt: VllmRequest) -> CachedRequest:
    blocks = list(map(list, new.block_ids))
    computed = new.num_computed_tokens
    return CachedRequest(new.req_id, prompt.new_tokens(), blocks, computed, is_resumed=True)


def _cached(data: Any, prompts: Mapping[str, VllmRequest]) -> list[CachedRequest]:
    requests: list[CachedRequest] = []
    rows = zip(data.req_ids, data.new_block_ids, data.num_computed_tokens, strict=True)
    for key, block_ids, computed in rows:
        prompt = prompts.get(key)
        if prompt is None:
            continue
        blocks = list(map(list, block_ids)) if block_ids else []
        is_resumed = key in data.resumed_req_ids
        tokens = prompt.new_tokens()
        requests.append(CachedRequest(key, tokens, blocks, computed, is_resumed=is_resumed))
    return requests
