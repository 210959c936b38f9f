"""How engines hand a prompt's blocks over, in the words of vLLM's connectors: pure.

    to who computes it   kv_transfer_params {do_remote_decode: true, …}, one token, no stream
    from it              kv_transfer_params {do_remote_prefill: true, where the blocks are}
    to who goes on       the same, as they came

What is in them is between the engines. Only `source` is the router's: see `Decision`.
"""

from typing import Any

import msgspec
from msgspec import Struct, structs

from router.forward.bodies import CHAT, UNREADABLE, Asked
from router.forward.headers import (
    PREFILL_CACHED_TOKENS,
    PREFILL_PREDICTED_TOKENS,
    PREFILL_WORKER_ID,
    Pairs,
)
from router.protocol.replies import Decision
from router.protocol.requests import SelectRequest, Usage

PARAMS = "kv_transfer_params"
BYPASS = "x-bypass-remote-prefill"
"""The annotation that asks for a prompt to be computed where its answer is written."""

_SAID_BY_WHO_HANDS_OVER = ("do_remote_prefill", "do_remote_decode", "source")
_TO_PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
_NOT_OF_PREFILL = ("stream_options", "return_token_ids", "best_of")


class HandOver(Struct, frozen=True, eq=False):
    """What is asked of the router for a request whose prompt another has computed, or shall not.

    `params`: for the engine that goes on; None: it computes the prompt. `decision`: who has
    computed it; `ended_s`: when, and `usage`: what its engine said of it.
    """

    request: SelectRequest
    params: dict[str, Any] | None = None
    decision: Decision | None = None
    ended_s: float = 0.0
    usage: Usage | None = None

    @property
    def headers(self) -> Pairs:
        """What the client is told of it."""
        if self.decision is None:
            return ()
        predicted_tokens = self.decision.predicted_cached_blocks * self.decision.block_size
        said = [(PREFILL_WORKER_ID, self.decision.worker_id)]
        said.append((PREFILL_PREDICTED_TOKENS, predicted_tokens))
        if self.usage is not None:
            said.append((PREFILL_CACHED_TOKENS, self.usage.cached))
        return [(name, b"%d" % number) for name, number in said]


class Prefilled(Struct, frozen=True):
    """What an engine answers that has computed a prompt."""

    kv_transfer_params: dict[str, Any] | None = None
    usage: Usage | None = None


_prefilled = msgspec.json.Decoder(Prefilled).decode
_params = msgspec.json.Decoder(dict[str, Any] | None).decode


def read_prefilled(body: bytes) -> Prefilled:
    """An answer, as far as it matters; what is none says nothing."""
    try:
        return _prefilled(body)
    except UNREADABLE:
        return Prefilled()


def own_params(asked: Asked) -> dict[str, Any]:
    """What a client says of blocks elsewhere."""
    said = asked.fields.get(PARAMS)
    try:
        return {} if said is None else _params(said) or {}
    except UNREADABLE:
        return {}  # the engine says what is wrong with it


def is_handed_over(asked: Asked) -> bool:
    """Whether a client looks after that itself."""
    if PARAMS not in asked.fields:
        return False
    params = own_params(asked)
    return bool(params) and any(params.get(name) for name in _SAID_BY_WHO_HANDS_OVER)


def is_to_bypass(asked: Asked) -> bool:
    """Whether a client wants its prompt computed where it is answered."""
    return any(each.partition(":")[0] == BYPASS for each in asked.extensions.annotations)


def prefill_body(asked: Asked) -> bytes:
    """The body for who only computes the prompt: one token shows that it has."""
    fields: dict[str, Any] = {"max_tokens": 1, "min_tokens": 1, "stream": False}
    if asked.path == CHAT and "max_completion_tokens" in asked.fields:
        fields["max_completion_tokens"] = 1
    if "n" in asked.fields:
        fields["n"] = 1
    fields[PARAMS] = {**own_params(asked), **_TO_PREFILL}
    return asked.to_engine(without=_NOT_OF_PREFILL, **fields)


def prefill_request(request: SelectRequest) -> SelectRequest:
    """What the router is asked for who computes the prompt. No conversation stays there."""
    return structs.replace(
        request,
        phase="prefill",
        request_id=None,
        session_id=None,
        affinity_target=None,
        pinned_worker=None,
        prefill_worker_id=None,
        expected_output_tokens=1,
    )


def decode_fields(asked: Asked, hand_over: HandOver | None, decision: Decision) -> dict[str, Any]:
    """Of the body for who answers: where it can have the prompt's blocks, if anywhere. What a
    client says of that counts more.
    """
    theirs: dict[str, Any] = {}
    if decision.source is not None:
        theirs["source"] = decision.source
    if hand_over is not None and hand_over.params is not None:
        theirs |= hand_over.params
    if not theirs or is_handed_over(asked):
        return {}
    return {PARAMS: {**own_params(asked), **theirs}}
