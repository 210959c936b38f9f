"""The fields of a completion request that a caller may send to an engine.

Engines do what their bodies say. `kv_transfer_params` names a host to connect to and blocks to
read, `priority` passes others, and a field that an engine adds in its next version may do more. So
fields that steer an engine need the scope `steer`, which no tenant has, and of a tenant's request
an engine gets the fields of these tables alone. Other requests pass byte for byte.

Sources: OpenAI's API reference (completions, chat); vLLM 0.33 `entrypoints/openai/*/protocol.py`;
SGLang 0.5 `srt/entrypoints/openai/protocol.py`; TensorRT-LLM 1.2 `serve/openai_protocol.py`.
"""

from msgspec import structs

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
_READ_HERE = "nvext"
"""Fields of this process; engines do not receive them."""

OF_TENANTS = frozenset(" ".join((_OPENAI, _ENGINES_SAMPLING, _TEMPLATES, _READ_HERE)).split())
"""The fields that a tenant's request may have; others are dropped."""


def permitted(asked: CompletionRequest, caller: Caller) -> tuple[CompletionRequest, list[str]]:
    """Return the request as this caller may send it, and the names of dropped fields, sorted.

    Raises SteeringRefusedError if the request steers an engine and the caller may not.
    """
    if caller.may("steer"):
        return asked, []
    for name in sorted(asked.fields.keys() & STEERING):
        raise SteeringRefusedError(name)
    if asked.read.nvext is not None and asked.extensions.agent_hints.priority is not None:
        raise SteeringRefusedError(_PRIORITY_HINT)
    if caller.tenant is None:
        return asked, []
    dropped = sorted(asked.fields.keys() - OF_TENANTS)
    if not dropped:
        return asked, []
    kept = {name: value for name, value in asked.fields.items() if name in OF_TENANTS}
    return structs.replace(asked, fields=kept), dropped
