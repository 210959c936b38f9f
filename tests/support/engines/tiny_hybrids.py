"""Hybrid models of three layers, with random weights that vLLM makes itself: nothing is downloaded.

Each is served with `--load-format=dummy`. Their answers mean nothing; what they cache does.
"""

import json
from pathlib import Path

from support.engines.tiny_llama import MAX_TOKENS, VOCABULARY, write_tiny_tokenizer

WINDOW_TOKENS = 64
CHUNK_TOKENS = 128

_COMMON = {
    "torch_dtype": "bfloat16", "vocab_size": VOCABULARY, "hidden_size": 128,
    "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": MAX_TOKENS,
    "rms_norm_eps": 1e-5, "rope_theta": 10_000.0, "tie_word_embeddings": True,
    "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip

_EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "norm_topk_prob": True,
}  # fmt: skip

MODELS = {
    "window": {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 32,
        "rope_local_base_freq": 10_000.0, "sliding_window": WINDOW_TOKENS,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
    "state": {
        "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next",
        "hidden_act": "silu", "partial_rotary_factor": 0.25,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        "full_attention_interval": 3, "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "linear_num_key_heads": 2, "linear_num_value_heads": 2, **_EXPERTS,
    },
    "chunk": {
        "architectures": ["Llama4ForCausalLM"], "model_type": "llama4_text",
        "hidden_act": "silu", "attention_chunk_size": CHUNK_TOKENS,
        "no_rope_layers": [1, 1, 0], "use_qk_norm": False, "intermediate_size_mlp": 256,
        "num_local_experts": 2, "num_experts_per_tok": 1, "interleave_moe_layer_step": 8,
        "moe_layers": [], "attn_temperature_tuning": False,
        "layer_types": ["chunked_attention", "chunked_attention", "full_attention"],
    },
}  # fmt: skip
"""Configurations: Gemma 3 with windows, Qwen3-Next with linear attention, Llama 4 with chunks."""


def write_tiny_hybrid(directory: Path, kind: str) -> None:
    """Write configuration and tokenizer, for `vllm serve DIRECTORY --load-format=dummy`."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(_COMMON | MODELS[kind]))
    write_tiny_tokenizer(directory)
