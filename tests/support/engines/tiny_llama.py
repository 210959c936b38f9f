"""A Llama of 0.4 million parameters, made on the spot: nothing is downloaded.

Its weights are random, but not arbitrary: attention has to look at what is far away, or two prompts
that differ only in their cached part would be answered alike, and a wrong hit would not be seen.
"""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np

VOCABULARY = 512
MAX_TOKENS = 2048
SEED = 20_240_607

_END, _UNKNOWN = 0, 1
_ROLES = ("system", "user", "assistant")

WORDS = range(_UNKNOWN + 1, VOCABULARY - len(_ROLES))
"""Tokens that mean nothing else."""

_CHAT = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}assistant"


class LlamaSize(NamedTuple):
    """Of a model with heads of 32 numbers."""

    layers: int = 2
    hidden: int = 128
    heads: int = 4
    kv_heads: int = 2


TINY = LlamaSize()


def write_tiny_llama(directory: Path, size: LlamaSize = TINY) -> None:
    """Configuration, weights and tokenizer, as `vllm serve DIRECTORY` reads them."""
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / "config.json", _config(size))
    write_tiny_tokenizer(directory)
    write_safetensors(directory / "model.safetensors", _weights(size))


def write_tiny_tokenizer(directory: Path) -> None:
    """Its words are numbers, in a folder of any model with this vocabulary."""
    _write_json(directory / "tokenizer.json", _tokenizer())
    _write_json(directory / "tokenizer_config.json", _tokenizer_config())


def word(token: int) -> str:
    """How the tokenizer spells a token; words are separated by spaces."""
    return f"t{token}"


def _config(size: LlamaSize) -> dict:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
        "vocab_size": VOCABULARY, "hidden_size": size.hidden, "intermediate_size": 2 * size.hidden,
        "num_hidden_layers": size.layers, "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads, "max_position_embeddings": MAX_TOKENS,
        "rms_norm_eps": 1e-5, "rope_theta": 10_000.0, "hidden_act": "silu",
        "tie_word_embeddings": False, "bos_token_id": _END, "eos_token_id": _END,
    }  # fmt: skip


def _weights(size: LlamaSize) -> dict[str, np.ndarray]:
    hidden, intermediate = size.hidden, 2 * size.hidden
    rng = np.random.default_rng(SEED)
    kv_hidden = hidden // size.heads * size.kv_heads

    def normal(std: float, *shape: int) -> np.ndarray:
        return rng.normal(0, std, shape).astype(np.float32)

    ones = np.ones(hidden, np.float32)
    weights = {
        "model.embed_tokens.weight": normal(1.0, VOCABULARY, hidden),
        "model.norm.weight": ones,
        "lm_head.weight": normal(0.3, VOCABULARY, hidden),
    }
    for layer in range(size.layers):
        of_layer = {
            "input_layernorm": ones,
            "post_attention_layernorm": ones,
            "self_attn.q_proj": normal(0.2, hidden, hidden),
            "self_attn.k_proj": normal(0.2, kv_hidden, hidden),
            "self_attn.v_proj": normal(0.15, kv_hidden, hidden),
            "self_attn.o_proj": normal(0.15, hidden, hidden),
            "mlp.gate_proj": normal(0.1, intermediate, hidden),
            "mlp.up_proj": normal(0.1, intermediate, hidden),
            "mlp.down_proj": normal(0.1, hidden, intermediate),
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
