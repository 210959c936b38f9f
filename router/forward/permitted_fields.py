"""The fields of a request that a caller may send to an engine.

Engines do what their bodies say. `kv_transfer_params` names a host to connect to and blocks to
read, `priority` passes others, and a field that an engine adds in its next version may do more. So
fields that steer an engine need the scope `steer`, which no tenant has, and of a tenant's request
an engine gets the fields of these tables alone. Other requests pass byte for byte.

Sources: OpenAI's API reference (completions, chat, Responses); Anthropic's (Messages); vLLM 0.33
`entrypoints/{openai,anthropic}/*/protocol.py`; SGLang 0.5 `srt/entrypoints/{openai,anthropic}/
protocol.py`; TensorRT-LLM 1.2 `serve/openai_protocol.py`.
"""

from collections.abc import Mapping

from msgspec import structs

from router.errors import InvalidFieldError
from router.forward.apis.api import (
    CHAT,
    COMPLETIONS,
    COUNT_TOKENS,
    MESSAGES,
    RESPONSES,
)
from router.forward.apis.passed import PASSED
from router.forward.errors import SteeringRefusedError
from router.forward.request_body import CompletionRequest
from router.runtime.security.caller import Caller

STEERING = frozenset(
    (
        "bootstrap_host",
        "bootstrap_pair_key",
        "bootstrap_port",
        "bootstrap_room",
        "custom_logit_processor",
        "data_parallel_rank",
        "disagg_prefill_dp_rank",
        "disaggregated_params",
        "ec_transfer_params",
        "kv_transfer_params",
        "logits_processors",
        "priority",
        "routed_dp_rank",
        "session_params",
        "vllm_xargs",
    )
)
"""Fields that choose hosts, ranks, blocks, code or the turns of others."""

_PRIORITY_HINT = "nvext.agent_hints.priority"

_OPENAI = """
    audio best_of echo frequency_penalty function_call functions logit_bias logprobs
    max_completion_tokens max_tokens messages metadata modalities model n parallel_tool_calls
    prediction presence_penalty prompt prompt_cache_key prompt_cache_retention reasoning_effort
    response_format safety_identifier seed service_tier stop store stream stream_options suffix
    temperature tool_choice tools top_logprobs top_p user verbosity web_search_options
"""
_RESPONSES = """
    background conversation frequency_penalty include input instructions logit_bias
    max_output_tokens max_tool_calls metadata model parallel_tool_calls presence_penalty
    previous_response_id prompt prompt_cache_key prompt_cache_retention reasoning
    safety_identifier seed service_tier stop store stream stream_options temperature text
    tool_choice tools top_logprobs top_p truncation user
"""
_MESSAGES = """
    container context_management inference_geo max_tokens messages metadata model output_config
    output_format service_tier stop_sequences stream system temperature thinking tool_choice
    tools top_k top_p
"""
_ENGINES_SAMPLING = """
    allowed_token_ids bad_words detokenize early_stopping ebnf guided_choice guided_grammar
    guided_json guided_regex guided_whitespace_pattern ignore_eos include_reasoning
    include_stop_str_in_output json_schema length_penalty min_p min_tokens no_stop_trim
    prompt_logprobs regex repetition_penalty return_token_ids return_tokens_as_token_ids
    separate_reasoning skip_special_tokens spaces_between_special_tokens stop_regex stop_token_ids
    stream_reasoning structured_outputs thinking_token_budget top_k top_p_min use_beam_search
"""
_TEMPLATES = """
    add_generation_prompt add_special_tokens cache_salt chat_template chat_template_kwargs
    continue_final_message documents truncate_prompt_tokens
"""
_RESPONSES_AT_ENGINES = "enable_response_messages mm_processor_kwargs previous_input_messages"
_MESSAGES_AT_ENGINES = "cache_salt chat_template_kwargs"
_READ_HERE = "nvext"
"""Fields of this process; engines do not receive them."""

_OF_OPENAI = (_OPENAI, _ENGINES_SAMPLING, _TEMPLATES)
_OF_RESPONSES = (_RESPONSES, _RESPONSES_AT_ENGINES, _ENGINES_SAMPLING, _TEMPLATES)
_OF_MESSAGES = (_MESSAGES, _MESSAGES_AT_ENGINES)


def _names(*tables: str) -> frozenset[str]:
    return frozenset(" ".join((*tables, _READ_HERE)).split())


OF_TENANTS: Mapping[str, frozenset[str]] = {
    COMPLETIONS: _names(*_OF_OPENAI),
    CHAT: _names(*_OF_OPENAI),
    RESPONSES: _names(*_OF_RESPONSES),
    MESSAGES: _names(*_OF_MESSAGES),
    COUNT_TOKENS: _names(*_OF_MESSAGES),
    **{path: route.fields for path, route in PASSED.items()},
}
"""The fields that a tenant's request to each API may have; others are dropped."""


def permitted(asked: CompletionRequest, caller: Caller) -> tuple[CompletionRequest, list[str]]:
    """Return the request as this caller may send it, and the names of dropped fields, sorted.

    Raises SteeringRefusedError if the request steers an engine and the caller may not, and
    InvalidFieldError for a form with a field that would be dropped: engines receive forms whole.
    """
    if caller.may("steer"):
        return asked, []
    for name in sorted(asked.fields.keys() & STEERING):
        raise SteeringRefusedError(name)
    if asked.read.nvext is not None and asked.extensions.agent_hints.priority is not None:
        raise SteeringRefusedError(_PRIORITY_HINT)
    if caller.tenant is None:
        return asked, []
    known = OF_TENANTS[asked.path]
    dropped = sorted(asked.fields.keys() - known)
    if not dropped:
        return asked, []
    if asked.path in PASSED and PASSED[asked.path].is_form:
        raise InvalidFieldError(dropped[0][:64], "no tenant may send it", "without it", status=422)
    kept = {name: value for name, value in asked.fields.items() if name in known}
    return structs.replace(asked, fields=kept, body=None), dropped
