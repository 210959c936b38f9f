"""KV transfer parameters between engines, in the format of vLLM's connectors. Pure.

    to the prefill worker     kv_transfer_params {do_remote_decode: true, …}, one token, no stream
    from it                   kv_transfer_params {do_remote_prefill: true, location of the blocks}
    to the decode worker      the same, unchanged

Their content is private to the engines. The router's are `source` (see `Decision`), or
`remote_kv_source` in its place where engines share blocks by vLLM's own P2P tier, and `target`, the
rank that will probably decode. An engine that answers with `pushed`, a number of blocks, writes
them there while it computes; the others are sent no `target`.
"""

from collections.abc import Mapping
from typing import Any
from uuid import uuid4

import msgspec
from msgspec import Struct, structs

from router.forward.apis.api import CHAT
from router.forward.headers import (
    PREFILL_CACHED_TOKENS,
    PREFILL_PREDICTED_TOKENS,
    PREFILL_WORKER_ID,
    Pairs,
)
from router.forward.request_body import CompletionRequest
from router.protocol.replies import BlockSource, Decision
from router.protocol.requests import RankTarget, SelectRequest, Usage
from router.protocol.values import UNREADABLE

PARAMS = "kv_transfer_params"
BYPASS = "x-bypass-remote-prefill"
"""The annotation that requests prefill on the decode worker."""

_SAID_BY_WHO_HANDS_OVER = (
    "do_remote_prefill",
    "do_remote_decode",
    "source",
    "remote_kv_source",
    "remote_prefiller",
    "remote_decoder",
)
_TO_PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
_NOT_OF_PREFILL = ("stream_options", "return_token_ids", "best_of")


class KvHandoff(Struct, frozen=True, eq=False):
    """The decode phase of a request after its prompt was computed, or was not, by another worker.

    `request`: the request to the router for the decode worker. `params`: KV transfer parameters for
    its engine; None: it computes the prompt. `decision`: the prefill worker. `ended_s`: end of the
    prefill. `usage`: usage reported by the prefill worker.
    """

    request: SelectRequest
    params: dict[str, Any] | None = None
    decision: Decision | None = None
    ended_s: float = 0.0
    usage: Usage | None = None

    @property
    def headers(self) -> Pairs:
        """The headers that describe the prefill to the client."""
        if self.decision is None:
            return ()
        predicted_tokens = self.decision.predicted_cached_blocks * self.decision.block_size
        values = [(PREFILL_WORKER_ID, self.decision.worker_id)]
        values.append((PREFILL_PREDICTED_TOKENS, predicted_tokens))
        if self.usage is not None:
            values.append((PREFILL_CACHED_TOKENS, self.usage.cached))
        return [(name, b"%d" % number) for name, number in values]


class Prefilled(Struct, frozen=True):
    """The response of an engine that computed a prompt."""

    kv_transfer_params: dict[str, Any] | None = None
    usage: Usage | None = None


_prefilled = msgspec.json.Decoder(Prefilled).decode
_params = msgspec.json.Decoder(dict[str, Any] | None).decode


def read_prefilled(body: bytes) -> Prefilled:
    """Return the fields of a response; empty fields if it is unreadable."""
    try:
        return _prefilled(body)
    except UNREADABLE:
        return Prefilled()


def own_params(asked: CompletionRequest) -> dict[str, Any]:
    """Return the client's own KV transfer parameters."""
    values = asked.fields.get(PARAMS)
    try:
        return {} if values is None else _params(values) or {}
    except UNREADABLE:
        return {}  # the engine reports the error


def is_handed_over(asked: CompletionRequest) -> bool:
    """Return whether the client controls the KV transfer itself."""
    if PARAMS not in asked.fields:
        return False
    params = own_params(asked)
    return bool(params) and any(params.get(name) for name in _SAID_BY_WHO_HANDS_OVER)


def is_to_bypass(asked: CompletionRequest) -> bool:
    """Return whether the client wants the decode worker to compute the prompt."""
    return any(each.partition(":")[0] == BYPASS for each in asked.extensions.annotations)


def pushes(params: Mapping[str, Any]) -> bool:
    """Return whether these parameters are of an engine that pushes blocks to a `target`."""
    return isinstance(params.get("pushed"), int)


def prefill_body(asked: CompletionRequest, target: RankTarget | None = None) -> bytes:
    """Return the body for the prefill worker; it generates one token, which shows the end.

    `target`: the rank to push the blocks to.
    """
    fields: dict[str, Any] = {"max_tokens": 1, "min_tokens": 1, "stream": False}
    if asked.path == CHAT and "max_completion_tokens" in asked.fields:
        fields["max_completion_tokens"] = 1
    if "n" in asked.fields:
        fields["n"] = 1
    fields[PARAMS] = {**own_params(asked), **_TO_PREFILL}
    if target is not None:
        fields[PARAMS]["target"] = target
    return asked.to_engine(without=_NOT_OF_PREFILL, **fields)


def prefill_request(request: SelectRequest) -> SelectRequest:
    """Return the router request for the prefill worker, without a session."""
    return structs.replace(
        request,
        phase="prefill",
        request_id=None,
        session_id=None,
        session_is_hint=False,
        session_is_final=False,
        affinity_target=None,
        pinned_worker=None,
        prefill_worker_id=None,
        expected_output_tokens=1,
    )


def decode_fields(
    asked: CompletionRequest, hand_over: KvHandoff | None, decision: Decision
) -> dict[str, Any]:
    """Return the body fields with KV transfer parameters for the decode worker.

    Empty without any, or if the client controls the transfer itself.
    """
    located = (hand_over.params if hand_over is not None else None) or {}
    theirs = _source_fields(asked, decision.source, has_location=bool(located)) | located
    if not theirs or is_handed_over(asked):
        return {}
    return {PARAMS: {**own_params(asked), **theirs}}


def _source_fields(
    asked: CompletionRequest, source: BlockSource | None, *, has_location: bool
) -> dict[str, Any]:
    """Return a source in the words of the engine; empty without one that it can use.

    vLLM computes each choice and each prompt as a request of its own with the same parameters, and
    its P2P tier takes two requests with one `kv_request_id` for one: several get no source. It
    would wait for the peer's answer in vain if a prefill worker has all blocks (`has_location`).
    """
    if source is None:
        return {}
    remote = source.remote_kv_source
    if remote is None:
        return {"source": source}
    if has_location or asked.choices > 1:
        return {}
    return {"remote_kv_source": {"kv_request_id": uuid4().hex, **structs.asdict(remote)}}
