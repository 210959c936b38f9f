"""A Llama of 0.4 million parameters, made on the spot: nothing is downloaded.

Its weights are random, but not arbitrary: attention has to look at what is far away, or two prompts
that differ only in their cached part would be answered alike, and a wrong hit would not be seen.
"""

import json
from pathlib import Path

import numpy as np

VOCABULARY = 512
LAYERS = 2
HIDDEN = 128
INTERMEDIATE = 256
HEADS, KV_HEADS = 4, 2
MAX_TOKENS = 2048
SEED = 20_240_607

_END, _UNKNOWN = 0, 1
_ROLES = ("system", "user", "assistant")

WORDS = range(_UNKNOWN + 1, VOCABULARY - len(_ROLES))
"""Tokens that mean nothing else."""

_CHAT = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}assistant"


def write_tiny_llama(directory: Path) -> None:
    """Configuration, weights and tokenizer, as `vllm serve DIRECTORY` reads them."""
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / "config.json", _config())
    write_tiny_tokenizer(directory)
    write_safetensors(directory / "model.safetensors", _weights())


def write_tiny_tokenizer(directory: Path) -> None:
    """Its words are numbers, in a folder of any model with this vocabulary."""
    _write_json(directory / "tokenizer.json", _tokenizer())
    _write_json(directory / "tokenizer_config.json", _tokenizer_config())


def word(token: int) -> str:
    """How the tokenizer spells a token; words are separated by spaces."""
    return f"t{token}"


def _config() -> dict:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
        "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "max_position_embeddings": MAX_TOKENS,
        "rms_norm_eps": 1e-5, "rope_theta": 10_000.0, "hidden_act": "silu",
        "tie_word_embeddings": False, "bos_token_id": _END, "eos_token_id": _END,
    }  # fmt: skip


def _weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(SEED)
    kv_hidden = HIDDEN // HEADS * KV_HEADS

    def normal(std: float, *shape: int) -> np.ndarray:
        return rng.normal(0, std, shape).astype(np.float32)

    ones = np.ones(HIDDEN, np.float32)
    weights = {
        "model.embed_tokens.weight": normal(1.0, VOCABULARY, HIDDEN),
        "model.norm.weight": ones,
        "lm_head.weight": normal(0.3, VOCABULARY, HIDDEN),
    }
    for layer in range(LAYERS):
        of_layer = {
            "input_layernorm": ones,
            "post_attention_layernorm": ones,
            "self_attn.q_proj": normal(0.2, HIDDEN, HIDDEN),
            "self_attn.k_proj": normal(0.2, kv_hidden, HIDDEN),
            "self_attn.v_proj": normal(0.15, kv_hidden, HIDDEN),
            "self_attn.o_proj": normal(0.15, HIDDEN, HIDDEN),
            "mlp.gate_proj": normal(0.1, INTERMEDIATE, HIDDEN),
            "mlp.up_proj": normal(0.1, INTERMEDIATE, HIDDEN),
            "mlp.down_proj": normal(0.1, HIDDEN, INTERMEDIATE),
        }
        for name, weight in of_layer.items():
            weights[f"model.layers.{layer}.{name}.weight"] = weight
    return weights


def write_safetensors(path: Path, weights: dict[str, np.ndarray]) -> None:
    """Write weights as vLLM reads them."""
    header, offset = {}, 0
    for name, weight in weights.items():
        offsets = [offset, offset + weight.nbytes]
        header[name] = {"dtype": "F32", "shape": weight.shape, "data_offsets": offsets}
        offset = offsets[1]
    encoded = json.dumps(header).encode()
    data = b"".join(weight.tobytes() for weight in weights.values())
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)


def _tokenizer() -> dict:
    """Words t0 to t511, and the roles that a chat begins its turns with."""
    vocabulary = {word(token): token for token in range(VOCABULARY)}
    for token, role in enumerate(_ROLES, start=WORDS.stop):
        del vocabulary[word(token)]
        vocabulary[role] = token
    unknown = word(_UNKNOWN)
    return {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": unknown},
    }


def _tokenizer_config() -> dict:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": word(_END),
        "unk_token": word(_UNKNOWN),
        "model_max_length": MAX_TOKENS,
        "chat_template": _CHAT,
    }


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content))
