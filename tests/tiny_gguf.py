"""Tiny random models of each architecture, and GGUF files of them in each tensor type.

Written by the format's description alone, so that it can disagree with engine/models: the names,
the query-key permutation and Gemma's norms are spelled out here a second time.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB_SIZE = 67
TOKENS = torch.tensor(
    [[1, 5, 66, 9, 33, 20, 0, 41, 41, 7, 12, 58, 64, 3, 30, 2, 11, 19, 27, 65, 8]]
)

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.05,
    "tie_word_embeddings": False,
}
_SMALL = {"hidden_size": 64, "intermediate_size": 96}  # too narrow for blocks of 256
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "qwen2": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, **_SMALL},
    "qwen3": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        "head_dim": 32,
        **_SMALL,
    },
    "gemma3": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 500.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
        **_SMALL,
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "num_hidden_layers": 7,
        "sliding_window": 5,
        "tie_word_embeddings": True,
    },
}
_MODEL_TYPES = {"gemma3": "gemma3_text"}

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
}
_GEMMA_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}

# Types that the gguf package cannot write: bytes per block, and where float16 scales lie in it.
_RANDOM_BLOCKS = {Type.Q4_K: (144, (0, 2)), Type.Q5_K: (176, (0, 2)), Type.Q6_K: (210, (208,))}


def tiny_family(family: str, **changes: object) -> PreTrainedModel:
    """A float32 model of the family with random weights, norms and biases included."""
    model_type = _MODEL_TYPES.get(family, family)
    config = AutoConfig.for_model(model_type, **{**_SIZES, **FAMILIES[family], **changes})
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
        for name, value in model.named_parameters():
            if value.ndim == 1:
                mean = 0.0 if family == "gemma3" or name.endswith("bias") else 1.0
                value.copy_(mean + 0.2 * torch.randn(value.shape))
    return model


def write_gguf(
    path: Path,
    family: str,
    model: PreTrainedModel,
    kind: Type = Type.F32,
    *,
    metadata: Mapping[str, Any] = {},
    leave_out: tuple[str, ...] = (),
    extra: Mapping[str, np.ndarray] = {},
) -> None:
    """Write the model as a GGUF file, matrices in type `kind`, and round its own weights likewise.

    `metadata` adds keys after the architecture's name (None takes one away); `leave_out` and
    `extra` do so with tensors.
    """
    writer = gguf.GGUFWriter(path, family)
    for key, value in {**_metadata(family, model), **metadata}.items():
        _add(writer, f"{family}.{key}", value)
    tied = model.config.tie_word_embeddings
    for parameter, value in model.state_dict().items():
        name = _name(family, parameter)
        if name in leave_out or (tied and parameter == "lm_head.weight"):
            continue
        if value.ndim == 1:
            stored = value + (family == "gemma3" and parameter.endswith("norm.weight"))
            writer.add_tensor(name, _permute(family, model, parameter, stored.numpy()))
            continue
        blocks = _blocks(value.numpy(), kind)
        value.copy_(torch.from_numpy(np.array(gguf.dequantize(blocks, kind))))
        permuted = _permute(family, model, parameter, blocks)
        writer.add_tensor(name, np.ascontiguousarray(permuted), raw_dtype=kind)
    for name, array in extra.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _metadata(family: str, model: PreTrainedModel) -> dict[str, Any]:
    config = model.config
    values = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": 500.0,
        "vocab_size": config.vocab_size,
    }
    if family in ("qwen3", "gemma3"):
        values |= {
            "attention.key_length": config.head_dim,
            "attention.value_length": config.head_dim,
        }
    if family == "gemma3":
        values["attention.sliding_window"] = config.sliding_window
    return values


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    elif value is not None:
        writer.add_uint32(key, value)


def _name(family: str, parameter: str) -> str:
    names = {**_NAMES, **(_GEMMA_NAMES if family == "gemma3" else {})}
    for ours, theirs in sorted(names.items(), key=lambda pair: -len(pair[0])):
        parameter = parameter.replace(ours + ".", theirs + ".")
    return parameter


def _blocks(value: np.ndarray, kind: Type) -> np.ndarray:
    """Quantise rows; where the package cannot, make up random blocks with small scales."""
    if kind not in _RANDOM_BLOCKS:
        quantised = gguf.quantize(value, kind)
        return np.ascontiguousarray(quantised).view(np.uint8)
    num_bytes, scales = _RANDOM_BLOCKS[kind]
    rng = np.random.default_rng(value.size)
    blocks = rng.integers(0, 256, (value.shape[0], value.shape[1] // 256, num_bytes), np.uint8)
    for place in scales:
        scale = (rng.random(blocks.shape[:2]) * 2e-4).astype(np.float16)
        blocks[:, :, place : place + 2] = scale[..., None].view(np.uint8)
    return blocks.reshape(value.shape[0], -1)


def _permute(family: str, model: PreTrainedModel, parameter: str, rows: np.ndarray) -> np.ndarray:
    """Reorder a llama's query and key rows as its converter does: halves of a head interleaved."""
    config = model.config
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    num_heads = heads.get(parameter.split(".")[-2])
    if family != "llama" or num_heads is None:
        return rows
    halves = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)
