"""Hybrid models of three layers, with random weights that vLLM makes itself: nothing is downloaded.

Each is served with `--load-format=dummy`. Their answers mean nothing; what they cache does. Those
of `write_tiny_gemma` follow from all tokens that its layers attend to.
"""

import json
from pathlib import Path

import numpy as np

from support.engines.tiny_llama import (
    MAX_TOKENS,
    VOCABULARY,
    write_safetensors,
    write_tiny_tokenizer,
)

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
    "sizes": {
        "architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text",
        "hidden_activation": "gelu_pytorch_tanh", "sliding_window": WINDOW_TOKENS,
        "global_head_dim": 64, "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": VOCABULARY,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
    "state": {
        "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next",
        "hidden_act": "silu", "partial_rotary_factor": 0.25,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        "full_attention_interval": 3, "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 64, "linear_value_head_dim": 64,
        "linear_num_key_heads": 1, "linear_num_value_heads": 1,
        "head_dim": 64, "num_key_value_heads": 4, **_EXPERTS,
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
"""Configurations: Gemma 3 with windows, Gemma 4 with windows in larger blocks than full attention,
Qwen3-Next with linear attention, Llama 4 with chunks."""


def write_tiny_hybrid(directory: Path, kind: str) -> None:
    """Write configuration and tokenizer, for `vllm serve DIRECTORY --load-format=dummy`."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(_COMMON | MODELS[kind]))
    write_tiny_tokenizer(directory)


def write_tiny_gemma(directory: Path) -> None:
    """Write a model with windows of which the answers show what it reads: it has weights."""
    write_tiny_hybrid(directory, "window")
    config = _COMMON | MODELS["window"] | {"tie_word_embeddings": False}
    (directory / "config.json").write_text(json.dumps(config))
    write_safetensors(directory / "model.safetensors", _gemma_weights(config))


def _gemma_weights(config: dict) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    hidden, inner, head_size = (config[k] for k in ("hidden_size", "intermediate_size", "head_dim"))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]

    def normal(std: float, *shape: int) -> np.ndarray:
        return rng.normal(0, std, shape).astype(np.float32)

    weights = {
        "model.embed_tokens.weight": normal(0.1, VOCABULARY, hidden),
        "model.norm.weight": np.zeros(hidden, np.float32),
        "lm_head.weight": normal(0.3, VOCABULARY, hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        of_layer = {
            "self_attn.q_proj": normal(0.2, heads * head_size, hidden),
            "self_attn.k_proj": normal(0.2, kv_heads * head_size, hidden),
            "self_attn.v_proj": normal(0.15, kv_heads * head_size, hidden),
            "self_attn.o_proj": normal(0.15, hidden, heads * head_size),
            "mlp.gate_proj": normal(0.1, inner, hidden),
            "mlp.up_proj": normal(0.1, inner, hidden),
            "mlp.down_proj": normal(0.1, hidden, inner),
        }
        norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
        of_layer |= {f"{name}_layernorm": np.zeros(hidden, np.float32) for name in norms}
        of_layer |= {f"self_attn.{x}_norm": np.full(head_size, 1.5, np.float32) for x in "qk"}
        weights |= {f"model.layers.{layer}.{name}.weight": each for name, each in of_layer.items()}
    return weights
