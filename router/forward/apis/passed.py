"""The APIs whose requests pass byte for byte: no prompt of theirs is matched with caches.

Only the routes of this table are passed on, so that an engine's administration (`/sleep`,
`/v1/load_lora_adapter`, which loads files, `/collective_rpc`) is reached by no caller. Which
workers serve a route depends on their model and flags, and is learned from their answers. Facts:
vLLM 0.32, SGLang 0.5.23; TensorRT-LLM's documents.
"""

from collections.abc import Mapping
from typing import Literal, TypeAlias

import msgspec
from msgspec import Struct

from router.forward.apis import error_formats, reported_usage
from router.forward.apis.api import Api
from router.protocol.values import UNREADABLE

EngineKind: TypeAlias = Literal["vLLM", "SGLang", "TensorRT-LLM"]


class PassedRoute(Struct, frozen=True):
    """A route that is passed on.

    `engines`: the kinds that have it. `fields`: those that a tenant may send, and `cache_salt`,
    because a token may be limited to requests with certain salts. `is_form`: its body is a form
    with a file. `is_booked`: its size counts as load, from its arrival to its answer.
    """

    api: Api
    engines: tuple[EngineKind, ...]
    fields: frozenset[str]
    is_form: bool = False
    is_booked: bool = True


_COMMON = "model user truncate_prompt_tokens add_special_tokens"
_POOLED = f"""{_COMMON} activation add_generation_prompt chat_template chat_template_kwargs
    continue_final_message data dimensions embed_dtype encoding_format endianness input messages
    normalize pooling_task softmax task text token_ids use_activation"""
_COHERE = """model embedding_types images input_type inputs max_tokens output_dimension texts
    truncate"""
_RERANKED = f"""{_COMMON} documents instruction max_chunks_per_doc max_tokens_per_doc query
    return_documents top_n use_activation"""
_SCORED = f"""{_COMMON} apply_softmax data_1 data_2 documents encoding_format item_first items
    label_token_ids queries query text_1 text_2 use_activation"""
_SPOKEN = """model file chunking_strategy frequency_penalty hotwords include include[] language
    max_completion_tokens min_p presence_penalty prompt repetition_penalty response_format seed
    stream stream_continuous_usage_stats stream_include_usage temperature timestamp_granularities
    timestamp_granularities[] to_language top_k top_p user"""
_TOKENIZED = """model add_generation_prompt add_special_tokens chat_template chat_template_kwargs
    continue_final_message messages prompt return_token_strs tools"""
_DETOKENIZED = "model skip_special_tokens tokens"

_BOTH: tuple[EngineKind, ...] = ("vLLM", "SGLang")
_ALL: tuple[EngineKind, ...] = ("vLLM", "SGLang", "TensorRT-LLM")


def _route(
    path: str,
    fields: str,
    engines: tuple[EngineKind, ...],
    *,
    is_form: bool = False,
    is_booked: bool = True,
) -> PassedRoute:
    reported, errors = reported_usage.of_openai, error_formats.OPENAI
    api = Api(path, None, (), (), "", reported, None, errors, computes=False, passes=True)
    return PassedRoute(api, engines, frozenset(("cache_salt", *fields.split())), is_form, is_booked)


_TABLE = (
    _route("/v1/embeddings", _POOLED, _ALL),
    _route("/v2/embed", _COHERE, ("vLLM",)),
    _route("/pooling", _POOLED, ("vLLM",)),
    _route("/classify", _POOLED, _BOTH),
    _route("/v1/classify", _POOLED, ("SGLang",)),
    _route("/rerank", _RERANKED, ("vLLM",)),
    _route("/v1/rerank", _RERANKED, _BOTH),
    _route("/v2/rerank", _RERANKED, ("vLLM",)),
    _route("/score", _SCORED, ("vLLM",)),
    _route("/v1/score", _SCORED, _BOTH),
    _route("/v1/audio/transcriptions", _SPOKEN, _BOTH, is_form=True),
    _route("/v1/audio/translations", _SPOKEN, ("vLLM",), is_form=True),
    _route("/tokenize", _TOKENIZED, _ALL, is_booked=False),
    _route("/detokenize", _DETOKENIZED, _ALL, is_booked=False),
)

PASSED: Mapping[str, PassedRoute] = {route.api.path: route for route in _TABLE}
"""The routes by path."""


class _Missing(Struct, frozen=True):
    detail: str = ""


_missing = msgspec.json.Decoder(_Missing).decode


def says_it_is_missing(status: int, body: bytes) -> bool:
    """Return whether an engine's answer is its web framework's for a route that it does not have.

    An engine that has the route answers an unknown model in words of its own.
    """
    if status != 404 or len(body) > 1024:
        return False
    try:
        return _missing(body).detail == "Not Found"
    except UNREADABLE:
        return False
